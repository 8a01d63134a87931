"""Layout of the shared memory: the board, the buckets, the writers' scratch space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_fleet.weight_sync.buckets import BucketLayout, aligned, parse_buckets
from megatron_fleet.weight_sync.shm.board import Board
from megatron_fleet.weights.source import ParamMeta


class SharedLayout(BucketLayout):
    """A `BucketLayout` that follows a board.

    Attributes:
        writers: number of ranks that write.
        scratch: offset of the writers' scratch space.
        nbytes: total size of the memory.
    """

    def __init__(self, buckets: Sequence[Sequence[ParamMeta]], writers: int, scratch_bytes: int = 0) -> None:
        super().__init__(buckets, start=Board.nbytes(len(buckets), writers))
        self.writers = writers
        self.scratch = self.end
        self._scratch_bytes = scratch_bytes
        self.nbytes = self.scratch + scratch_bytes

    def describe(self) -> dict[str, Any]:
        """Describe the layout as plain values, for `parse_layout`."""
        return super().describe() | {"writers": self.writers, "scratch_bytes": self._scratch_bytes}

    def piece(self, bucket: int, writer: int) -> tuple[int, int]:
        """Byte range of a bucket whose checksum this writer computes."""
        start, end = self.spans[bucket]
        step = aligned(-(-(end - start) // self.writers))
        return min(start + writer * step, end), min(start + (writer + 1) * step, end)

    def board(self, memory: torch.Tensor) -> Board:
        """The board at the start of mapped memory."""
        return Board(memory.numpy(), len(self.buckets), self.writers)


def parse_layout(described: Mapping[str, Any]) -> SharedLayout:
    """Rebuild the layout from `SharedLayout.describe`. Raises ValueError if the lists are inconsistent."""
    lists = dict(described)
    writers, scratch_bytes = lists.pop("writers"), lists.pop("scratch_bytes")
    return SharedLayout(parse_buckets(**lists), writers, scratch_bytes)


def map_memory(path: str, nbytes: int) -> torch.Tensor:
    """Map the whole file as shared uint8 memory ``[nbytes]``. Raises RuntimeError if it cannot be mapped."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
