"""Check that boxes tile a tensor without holes or overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

_MOST_COMPARISONS = 5_000_000
"""Maximum pairs of chunks compared: takes a few seconds, thousands of times what any saved layout needs."""


class Box(Protocol):
    """A part of a tensor: its start and size along each axis."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...


def tiling_fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Reason why ``boxes`` do not cover every element of ``shape`` exactly once; ``None`` if they do.

    Boxes inside the shape whose volumes add up to its volume tile it exactly if no two overlap. On a grid, the usual
    case, this takes linear time; otherwise the boxes are compared along a sweep.
    """
    volume = 0
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"a chunk has {len(box.offsets)} axes and the tensor {len(shape)}"
        for offset, size, limit in zip(box.offsets, box.sizes, shape, strict=True):
            if offset + size > limit:
                return f"the chunk at {list(box.offsets)} of size {list(box.sizes)} lies outside shape {list(shape)}"
        volume += prod(box.sizes)
    filled = [box for box in boxes if 0 not in box.sizes]
    if not _on_grid(filled) and (fault := _sweep(filled)) is not None:
        return fault
    if volume != prod(shape):
        return f"its chunks hold {volume} of {prod(shape)} elements"
    return None


def _on_grid(boxes: Sequence[Box]) -> bool:
    """Whether the boxes are distinct cells of one grid of disjoint intervals per axis."""
    if len({box.offsets for box in boxes}) < len(boxes):
        return False
    for axis in range(len(boxes[0].offsets) if boxes else 0):
        ends: dict[int, int] = {}
        for box in boxes:
            start = box.offsets[axis]
            end = start + box.sizes[axis]
            if ends.setdefault(start, end) != end:
                return False
        previous = 0
        for start in sorted(ends):
            if start < previous:
                return False
            previous = ends[start]
    return True


def _sweep(boxes: Sequence[Box]) -> str | None:
    """The first overlap found in a sweep along the axis with the most distinct starts."""
    rank = len(boxes[0].offsets)
    if not rank:
        return "its chunks overlap"
    axis = max(range(rank), key=lambda a: len({box.offsets[a] for box in boxes}))
    left = _MOST_COMPARISONS
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[axis]):
        start = box.offsets[axis]
        open_boxes = [other for other in open_boxes if other.offsets[axis] + other.sizes[axis] > start]
        left -= len(open_boxes)
        if left < 0:
            return f"its {len(boxes)} chunks are laid out too irregularly to check"
        for other in open_boxes:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            ):
                return f"its chunks at {list(other.offsets)} and {list(box.offsets)} overlap"
        open_boxes.append(box)
    return None
