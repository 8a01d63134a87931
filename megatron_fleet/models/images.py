"""Images in a token stream: their positions, and the number of tokens a model's image processor produces for one.

In token ids an image is a run of one repeated *placeholder*, between the marks of the chat format. Neither text nor
the policy can produce a placeholder (see ``Vision.unspoken_ids``), so the runs of a prompt are its images in order.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import PIL.Image

from megatron_fleet.config.files import read_object
from megatron_fleet.envs.base import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Accepted file formats; Pillow supports others, some of which start external programs."""
MAX_PIXELS = 50_000_000
"""Limit before the processor downscales an image: a file of a few bytes can claim any size."""
MAX_ASPECT = 200
"""Ratio of longer to shorter side; image processors reject larger ones."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image in a trajectory.

    Attributes:
        start: index of the first placeholder in ``Trajectory.token_ids``.
        end: index after the last placeholder.
        digest: key into ``Trajectory.images``, see ``digest``.
    """

    start: int
    end: int
    digest: str


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a request to the engine.

    Attributes:
        start: index of the first placeholder in the prompt.
        end: index after the last placeholder.
        digest: digest of ``image``, see ``digest``.
    """

    start: int
    end: int
    image: Image
    digest: str


class Vision(Protocol):
    """Token-level view of a model's image processor."""

    @property
    def placeholder_id(self) -> int:
        """Token id that represents a part of an image."""
        ...

    @property
    def unspoken_ids(self) -> tuple[int, ...]:
        """Token ids the policy must not sample, because the engine would expect an image after them.

        The first one ends the turn, and with it the episode.
        """
        ...

    def tokens(self, width: int, height: int) -> int:
        """Number of placeholders for an image of this size in pixels."""
        ...


def read_vision(folder: str | Path) -> Vision | None:
    """Read the image processing of ``folder``'s model, as its family does (``FAMILY/vision.py``).

    Returns ``None`` if the model is text-only or its image processing is not supported.

    Raises:
        UserError: a file that defines image tokenization is missing or not understood.
    """
    from megatron_fleet.models.families import family_modules

    path = Path(folder) / "config.json"
    config = read_object(path, "fetch the model again") if path.is_file() else {}
    readers = (m.read_vision for m in family_modules("vision") if config.get("model_type") in m.MODEL_TYPES)
    reader: Callable[[Path, Mapping[str, Any]], Vision] | None = next(readers, None)
    return None if reader is None else reader(Path(folder), config)


def size_of(image: Image) -> tuple[int, int]:
    """Width and height in pixels, from the file header. Raises ValueError if it is not an image of ``FORMATS``."""
    try:
        with PIL.Image.open(io.BytesIO(image.data), formats=FORMATS) as opened:
            return opened.size
    except Exception as error:  # broken files make the decoders raise anything
        raise ValueError(str(error)) from error


def readable(image: Image) -> bool:
    """Whether the whole file decodes to an image that image processors accept. Costs a full decode."""
    try:
        width, height = size_of(image)
        if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
            return False
        with PIL.Image.open(io.BytesIO(image.data), formats=FORMATS) as opened:
            opened.load()
    except Exception:  # as above
        return False
    return True


def digest(image: Image) -> str:
    """SHA-256 of the encoded file, in hexadecimal."""
    return hashlib.sha256(image.data).hexdigest()


def place(ids: Sequence[int], images: Sequence[Image], vision: Vision | None, first: int = 0) -> list[PlacedImage]:
    """Locate ``images`` in ``ids``, which begin at position ``first`` of a prompt.

    Raises:
        ValueError: the placeholder runs do not match ``images``.
    """
    if vision is None or not images:
        if images:
            raise ValueError(f"{len(images)} images for a model without vision")
        return []
    pad, at, found = vision.placeholder_id, 0, []
    for image in images:
        length = vision.tokens(*size_of(image))
        start = ids.index(pad, at)
        at = start + length
        if list(ids[start : at + 1]).count(pad) != length:
            raise ValueError(f"the placeholders at {start} are not the {length} of their image")
        found.append(PlacedImage(first + start, first + at, image, digest(image)))
    if pad in ids[at:]:
        raise ValueError("there are placeholders without an image")
    return found


def around(text: str, count: int) -> list[str]:
    """Split ``text`` at the positions of ``count`` images into ``count + 1`` parts.

    An image without a position (never named, or its position was truncated with the text) follows the text.
    """
    parts, rest = [], text
    for number in range(1, count + 1):
        part, _, behind = rest.partition(f"[image {number}]")
        parts.append(part)
        rest = behind
    return [*parts, rest]
