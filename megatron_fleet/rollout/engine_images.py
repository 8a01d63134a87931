"""Images in vLLM requests: vLLM preprocesses the images, we set their positions in the prompt.

vLLM would search the prompt for placeholder tokens and expand each to the size of its image. Our prompts have already
expanded ids with known image positions. So vLLM gets one placeholder per image, its token counts are checked against
ours, and the request is built from our ids. The engine sees exactly these ids, and treats a placeholder token that the
policy sampled as an ordinary token.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL.Image

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.images import FORMATS, MAX_ASPECT, MAX_PIXELS, PlacedImage, Vision

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput


class ImageRequests:
    """Builder of requests for one engine whose model takes images."""

    def __init__(self, renderer: Any, vision: Vision) -> None:
        """Args: ``renderer``: renderer of vLLM's AsyncLLM."""
        self._renderer = renderer
        self._vision = vision

    async def make(self, prompt: list[int], images: Sequence[PlacedImage], salt: str | None) -> MultiModalInput:
        """Return vLLM's input for a prompt with images.

        Raises:
            ValueError: an image cannot be read, or its range in ``prompt`` is invalid or of the wrong size.
        """
        from vllm.inputs import TokensPrompt
        from vllm.inputs.engine import mm_input

        files = self._checked(prompt, images)
        request = TokensPrompt(
            prompt_token_ids=[self._vision.placeholder_id] * len(images),
            multi_modal_data={"image": files},
            # Without explicit UUIDs vLLM hashes the pixels, which decodes every image again in each turn.
            multi_modal_uuids={"image": [placed.digest for placed in images]},
        )
        try:
            (made,) = await self._renderer.render_cmpl_async([request])
        except Exception as error:  # Pillow decodes here; broken files can raise any exception
            raise ValueError(f"the images of this prompt cannot be processed: {error}") from error
        ranges = made["mm_placeholders"]["image"]
        for placed, found in zip(images, ranges, strict=True):
            if found.length != placed.end - placed.start:
                raise ValueError(_wrong_size(placed, found.length))
        there = [dataclasses.replace(r, offset=placed.start) for placed, r in zip(images, ranges, strict=True)]
        return mm_input(prompt, made["mm_kwargs"], made["mm_hashes"], {"image": there}, cache_salt=salt)

    def _checked(self, prompt: list[int], images: Sequence[PlacedImage]) -> list[PIL.Image.Image]:
        """Check the images and return them opened but not decoded: most are in vLLM's cache from earlier turns.

        Raises:
            ValueError: see `make`.
        """
        files, end = [], 0
        for placed in images:
            file = _open(placed)
            if not end <= placed.start < placed.end <= len(prompt):
                raise ValueError(f"an image at tokens {placed.start} to {placed.end} of a prompt of {len(prompt)}")
            if set(prompt[placed.start : placed.end]) != {self._vision.placeholder_id}:
                raise ValueError(f"tokens {placed.start} to {placed.end} are not all placeholders, but have an image")
            if (needed := self._vision.tokens(*file.size)) != placed.end - placed.start:
                raise ValueError(_wrong_size(placed, needed))
            files.append(file)
            end = placed.end
        return files


def _open(placed: PlacedImage) -> PIL.Image.Image:
    try:
        file = PIL.Image.open(io.BytesIO(placed.image.data), formats=FORMATS)
    except Exception as error:  # broken files can raise any exception
        raise ValueError(f"the image at token {placed.start} cannot be read: {error}") from error
    width, height = file.size
    if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
        raise ValueError(
            f"the image at token {placed.start} has {width} x {height} pixels, beyond the supported size or aspect "
            "ratio"
        )
    return file


def _wrong_size(placed: PlacedImage, needed: int) -> str:
    return f"the image at token {placed.start} needs {needed} placeholders, but has {placed.end - placed.start}"


def find_torchvision() -> None:
    """Make torchvision importable in this process and its child processes.

    vLLM imports it for vision models and all of Qwen3.5. A machine without a GPU has it in a separate folder
    (``setup.sh --dev``), because in site-packages every import of transformers would load it too.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return
    apart = str(Path(sys.prefix) / "torchvision")
    if not Path(apart).is_dir():
        raise UserError("vLLM needs torchvision for this model; run ./setup.sh --dev.")
    sys.path.append(apart)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), apart)))
