"""Reader of Megatron's ``torch_dist`` shards: each rank reads the parts that it needs, straight to where they belong.

Files are read as data: nothing named in a file is imported or called. By default torch unpickles ``.metadata`` and the
objects among the shards (``FileSystemReader.read_metadata``, ``DefaultLoadPlanner.load_bytes``): anyone who can write
into a checkpoint's folder could run code on every rank.

Not a collective. Ranks with equal parts of the model read the same bytes, which the system keeps in memory for those of
one machine. Megatron's own reader lets one rank read and send to the others, which then hold the model twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.weights.torch_dist.container import HEAD_BYTES, data_start
from megatron_fleet.weights.torch_dist.dtypes import DTYPES
from megatron_fleet.weights.torch_dist.index import COMMON, COMMON_OBJECT, Chunk, ChunkedTensor, read_places

BLOCK_VALUES = 8 << 20
"""Values in host memory at a time."""


class ShardReader:
    """An opened checkpoint. Not thread-safe: it reuses its buffer.

    Attributes:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        """Read the location of each part.

        Raises:
            UserError: ``.metadata`` or ``metadata.json`` is damaged, or contains unexpected objects.
        """
        self.path = path
        self._folder = LocalFolder(path, cached=True)
        self._tensors, self._objects = read_places(self._folder.read, self._folder.sizes(), str(path))
        self._by_lead: dict[str, tuple[int, dict[tuple[int, ...], list[Chunk]]]] = {}
        self._starts: dict[Chunk, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def names(self) -> set[str]:
        """Keys of tensors and objects."""
        return self._tensors.keys() | self._objects.keys()

    def require_tensor(self, key: str, shape: tuple[int, ...], allow_shape_mismatch: bool = False) -> None:
        """Raise UserError if the checkpoint has no such tensor, or one of another shape unless that is allowed."""
        stored = self._tensors.get(key)
        if stored is None or not (stored.shape == shape or allow_shape_mismatch):
            self._lacks(key)

    def require_object(self, key: str) -> None:
        """Raise UserError if the checkpoint has no such object."""
        if key not in self._objects:
            self._lacks(key)

    def _lacks(self, key: str) -> NoReturn:
        raise UserError(
            f"{self.path} holds no {key} as the model has it; train as this run began, or choose another run.out."
        )

    def read_box(self, key: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Fill ``out``, which is the part of a tensor at ``offsets``; outside the stored tensor it becomes zero.

        Raises:
            UserError: a file is damaged, or holds something other than a tensor there.
        """
        stored = self._tensors[key]
        if any(a + n > limit for a, n, limit in zip(offsets, out.shape, stored.shape, strict=True)):
            out.zero_()
        for chunk in self._chunks(key, stored, offsets, out.shape):
            self._copy(chunk, stored.dtype, offsets, out)

    def _chunks(self, key: str, stored: ChunkedTensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[Chunk]:
        """The chunks that may meet a box: one of many layers and experts is found without looking at the others."""
        if key not in self._by_lead:
            axes = range(len(stored.shape))
            lead = next((a for a in axes if any(chunk.sizes[a] != 1 for chunk in stored.chunks)), len(axes))
            grouped: dict[tuple[int, ...], list[Chunk]] = {}
            for chunk in stored.chunks:
                grouped.setdefault(chunk.offsets[:lead], []).append(chunk)
            self._by_lead[key] = lead, grouped
        lead, grouped = self._by_lead[key]
        indices = product(*(range(a, a + n) for a, n in zip(offsets[:lead], sizes[:lead], strict=True)))
        return [chunk for index in indices for chunk in grouped.get(index, [])]

    def _copy(self, chunk: Chunk, dtype: str, offsets: Sequence[int], out: torch.Tensor) -> None:
        """Copy the part of a chunk that lies in the box ``out`` at ``offsets``."""
        begin = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
        end = [min(a + n, b + m) for a, n, b, m in zip(offsets, out.shape, chunk.offsets, chunk.sizes, strict=True)]
        if any(a >= b for a, b in zip(begin, end, strict=True)):
            return
        part = out[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offsets, strict=True))]
        inside = [(a - o, b - o) for a, b, o in zip(begin, end, chunk.offsets, strict=True)]
        # Entries along the first axis with several of them lie behind each other; where only a part of each is needed,
        # the others' values are read too: a part of a row is too short for a separate read.
        axis = next((i for i, (a, b) in enumerate(inside) if b - a > 1), len(inside) - 1)
        if axis < 0:  # a tensor of one value without axes
            part, inside, axis = part.view(1), [(0, 1)], 0
        shape = chunk.sizes or (1,)
        first = 0
        for (a, _), size in zip(inside[: axis + 1], shape, strict=False):
            first = first * size + a
        row, rows = prod(shape[axis + 1 :]), inside[axis][1] - inside[axis][0]
        step = max(1, BLOCK_VALUES // row)
        into = part[(0,) * axis]
        for done in range(0, rows, step):
            count = min(step, rows - done)
            values = self._values(chunk, dtype, (first + done) * row, count * row).view(count, *shape[axis + 1 :])
            into[done : done + count].copy_(values[(slice(None), *(slice(*span) for span in inside[axis + 1 :]))])

    def _values(self, chunk: Chunk, dtype: str, first: int, count: int) -> torch.Tensor:
        """Values ``[count]`` of a chunk from ``first`` on; valid until the next call."""
        nbytes = count * DTYPES[dtype].nbytes
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        start = self._start(chunk, dtype) + first * DTYPES[dtype].nbytes
        self._folder.read_into(chunk.file, start, self._buffer.numpy().data[:nbytes])
        return self._buffer[:nbytes].view(getattr(torch, DTYPES[dtype].torch))

    def _start(self, chunk: Chunk, dtype: str) -> int:
        if chunk not in self._starts:
            head = self._folder.read(chunk.file, chunk.offset, min(HEAD_BYTES, chunk.length))
            try:
                self._starts[chunk] = data_start(head, chunk, dtype, chunk.file)
            except UserError as error:
                _refuse(self.path / chunk.file, error)
        return self._starts[chunk]

    def read_objects(self, key: str, count: int) -> list[Any]:
        """Read the ``count`` objects that a rank saved under one key, as tensors and plain values.

        Raises:
            UserError: it holds something else.
        """
        blob = self._objects[key]
        found = _plain(self.path / blob.file, self._folder.read(*blob))
        if not isinstance(found, list) or len(found) != count:
            raise UserError(f"{self.path}: {key} is not an object that Megatron saves; use another checkpoint.")
        return found

    def common(self) -> dict[str, Any]:
        """Read the state common to all ranks. Up to Megatron-Core 0.18 it is a file; since 0.19 an object.

        Raises:
            UserError: it cannot be read.
        """
        file = self.path / COMMON
        if file.exists():
            common = _plain(file, self._folder.read(COMMON))
        else:
            self.require_object(COMMON_OBJECT)
            (common,) = self.read_objects(COMMON_OBJECT, 1)
        if not isinstance(common, dict):
            raise UserError(f"{file} holds no dict; use another checkpoint.")
        return common


def _plain(file: Path, content: bytes) -> Any:
    try:
        # Explicit, because an environment variable turns torch's default into unpickling.
        return torch.load(BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        _refuse(file, error)


def _refuse(file: Path, error: Exception) -> NoReturn:
    """Raise UserError: torch's own message is pages of advice on loading the file anyway."""
    raise UserError(
        f"{file} is damaged, or holds something other than tensors and plain values ({type(error).__name__}), so do "
        f"not trust its source; use another checkpoint."
    ) from error
