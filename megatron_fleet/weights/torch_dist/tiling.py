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

    Boxes inside the shape whose volumes add up to its volume tile it exactly if no two overlap. Where their intervals
    along an axis are equal or disjoint, only boxes of one interval are looked at further, which takes linear time on a
    grid; what remains is compared along a sweep.
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
    if (fault := _Overlap().find(filled, range(len(shape)))) is not None:
        return fault
    if volume != prod(shape):
        return f"its chunks hold {volume} of {prod(shape)} elements"
    return None


class _Overlap:
    """Search for two boxes that overlap. Limits the comparisons in all."""

    def __init__(self) -> None:
        self._left = _MOST_COMPARISONS

    def find(self, boxes: Sequence[Box], axes: Sequence[int]) -> str | None:
        """Fault of boxes that are equal along every axis but ``axes``; ``None`` if none overlap."""
        if len(boxes) < 2:
            return None
        for axis in axes:
            groups = _groups(boxes, axis)
            if groups is not None:
                others = [other for other in axes if other != axis]
                return next((fault for group in groups if (fault := self.find(group, others)) is not None), None)
        return self._sweep(boxes, axes)

    def _sweep(self, boxes: Sequence[Box], axes: Sequence[int]) -> str | None:
        """The first overlap found in a sweep along the axis with the most distinct starts."""
        if not axes:
            return "its chunks overlap"
        axis = max(axes, key=lambda a: len({box.offsets[a] for box in boxes}))
        open_boxes: list[Box] = []
        for box in sorted(boxes, key=lambda b: b.offsets[axis]):
            start = box.offsets[axis]
            open_boxes = [other for other in open_boxes if other.offsets[axis] + other.sizes[axis] > start]
            self._left -= len(open_boxes)
            if self._left < 0:
                return "its chunks are laid out too irregularly to check"
            for other in open_boxes:
                if all(
                    box.offsets[a] < other.offsets[a] + other.sizes[a]
                    and other.offsets[a] < box.offsets[a] + box.sizes[a]
                    for a in axes
                ):
                    return f"its chunks at {list(other.offsets)} and {list(box.offsets)} overlap"
            open_boxes.append(box)
        return None


def _groups(boxes: Sequence[Box], axis: int) -> list[list[Box]] | None:
    """Boxes by their interval along an axis; ``None`` if two intervals overlap without being equal."""
    groups: dict[int, list[Box]] = {}
    for box in boxes:
        groups.setdefault(box.offsets[axis], []).append(box)
    previous = 0
    for start in sorted(groups):
        first, *others = groups[start]
        if start < previous or any(box.sizes[axis] != first.sizes[axis] for box in others):
            return None
        previous = start + first.sizes[axis]
    return list(groups.values())
