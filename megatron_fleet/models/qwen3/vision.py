"""Image processing of Qwen2-VL to Qwen3-VL: the number of tokens of an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Values of ``model_type`` in ``config.json``."""


@dataclass(frozen=True, slots=True)
class QwenVision:
    """Qwen2-VL (arXiv 2409.12191, §2.1: naive dynamic resolution) and its successors.

    Attributes:
        patch: side of a patch in pixels.
        merge: patches along each side of the square that becomes one token.
        min_pixels, max_pixels: bounds to which an image is scaled.
    """

    placeholder_id: int
    unspoken_ids: tuple[int, ...]
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    def tokens(self, width: int, height: int) -> int:
        """See ``Vision``. Sides are rounded to multiples of patch × merge, roughly keeping the aspect ratio."""
        unit = self.patch * self.merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * columns


def read_vision(folder: Path, config: Mapping[str, Any]) -> QwenVision:
    """Read the image processing of a model folder; ``config``: its ``config.json``. Raises UserError."""
    processor = _processor(folder)
    try:
        size = processor.get("size") or {}
        vision = QwenVision(
            placeholder_id=int(config["image_token_id"]),
            unspoken_ids=(int(config["image_token_id"]), int(config["video_token_id"])),
            patch=int(processor["patch_size"]),
            merge=int(processor["merge_size"]),
            min_pixels=int(processor.get("min_pixels") or size["shortest_edge"]),
            max_pixels=int(processor.get("max_pixels") or size["longest_edge"]),
        )
        for name in ("patch", "merge", "min_pixels", "max_pixels"):
            if getattr(vision, name) < 1:
                raise ValueError(f"{name} is {getattr(vision, name)}")
        return vision
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"model.path={folder}: config.json and preprocessor_config.json do not say how images become tokens "
            f"({error}); fetch the model again."
        ) from None


def _processor(folder: Path) -> dict[str, Any]:
    """The image processor's settings; newer folders keep all processors in one file."""
    combined, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    if combined.is_file() and "image_processor" in (found := _json(combined)):
        return found["image_processor"]
    if own.is_file():
        return _json(own)
    raise UserError(
        f"model.path={folder}: preprocessor_config.json is missing, which says how images become tokens; fetch the "
        f"model again."
    )


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, "fetch the model again")
