"""Conversion of arrays of pixels in JSON values, such as a server's screen, to images.

Servers send a screen as nested lists, H×W×3 (RGB), H×W×4 (RGBA), H×W or H×W×1 (grey), or as a flat list of one of
these shapes, which is then in the field ``NAME_shape``. As text it is megabytes that no prompt has room for.
"""

from __future__ import annotations

import io
import math
from itertools import chain
from typing import Any

import PIL.Image

from megatron_fleet.envs.base import Image

MIN_SIDE = 64
"""Rows and columns from which an array is an image; smaller ones are boards and grids of symbols."""
MIN_WHITE = 64
"""Least maximum of a grey image; maps with a few kinds of cells stay text."""
MAX_DEPTH = 8
"""Levels of nested objects and lists that are searched."""
_MODES = {(): "L", (1,): "L", (3,): "RGB", (4,): "RGBA"}


def replace_pixels(value: Any, images: list[Image], declared: Any = None, depth: int = MAX_DEPTH) -> Any:
    """Return a JSON value with ``[image n]`` in place of every array of pixels, and append these to ``images`` as PNG.

    An array of pixels has at least `MIN_SIDE` rows and columns, and only whole numbers from 0 to 255.

    Args:
        declared: shape of ``value`` if it is flat, as its server states it.
        depth: number of levels that are searched.
    """
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return value
    if isinstance(value, dict):
        return {
            name: replace_pixels(inner, images, value.get(f"{name}_shape"), depth - 1) for name, inner in value.items()
        }
    image = _image(value, declared)
    if image is not None:
        images.append(image)
        return f"[image {len(images)}]"
    if not isinstance(value[0], dict | list):
        return value
    return [replace_pixels(inner, images, depth=depth - 1) for inner in value]


def _image(values: list[Any], declared: Any) -> Image | None:
    shape = _shape(values)
    flat = len(shape) == 1 and isinstance(declared, list) and all(isinstance(n, int) for n in declared)
    if flat:
        shape = declared
    mode = _MODES.get(tuple(shape[2:]))
    if len(shape) < 2 or min(shape[:2]) < MIN_SIDE or mode is None:
        return None
    try:
        data = bytes(values if flat else _flattened(values, shape))
    except (TypeError, ValueError):  # a number that is not in a byte, text, rows of different lengths
        return None
    if len(data) != math.prod(shape) or (mode == "L" and max(data) < MIN_WHITE):
        return None
    file = io.BytesIO()
    # The fastest level: a screen is compressed once and read once.
    PIL.Image.frombytes(mode, (shape[1], shape[0]), data).save(file, "PNG", compress_level=1)
    return Image("image/png", file.getvalue())


def _shape(values: Any) -> list[int]:
    """Lengths of nested lists, each of the first one."""
    shape: list[int] = []
    while isinstance(values, list) and values and len(shape) <= 3:
        shape.append(len(values))
        values = values[0]
    return shape


def _flattened(values: list[Any], shape: list[int]) -> list[Any]:
    """Numbers of nested lists. Raises TypeError or ValueError if a list is not as long as ``shape`` says."""
    for length in shape[1:]:
        if set(map(len, values)) != {length}:
            raise ValueError("lists of different lengths")
        values = list(chain.from_iterable(values))
    return values
