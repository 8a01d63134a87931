"""Memory that the trainer's ranks and the engines of one host map: tensors in buckets, and a board of what is ready.

Writers fill one bucket after another; engines load the ones that are ready meanwhile. Nothing but the board tells them:
a message per bucket would cost more than writing the bucket. A *round* is one attempt to publish, numbered from 1. The
board works like a seqlock: what is read counts only if no writer has begun another round by the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_fleet.weights.source import ParamMeta

ALIGNMENT = 256
"""Offsets are multiples of this many bytes, so that any dtype can be viewed in place."""
BUCKET_BYTES = 64 << 20
"""Small layers share a bucket up to this size. Smaller ones cost more turns, larger ones begin later."""
STALL_S = 600.0
"""A writer or engine that waits longer for another one gives up."""
_POLL_S = 1e-4
_BLOCK_WORDS = 4096

WRITTEN, ENCODED, SUMMED = range(3)
"""What a writer has done with a bucket in a round."""


class RoundLost(RuntimeError):
    """The round cannot be completed, or can no longer be read."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor and its first byte in the memory."""

    meta: ParamMeta
    offset: int


class SharedLayout:
    """Where everything lies; equal wherever it is made from the same arguments.

    Attributes:
        buckets: the slots of each.
        spans: first byte of each bucket, and the byte after its last; aligned, both.
        scratch: first byte of the writers' own space.
        nbytes: of the whole memory.
    """

    def __init__(self, buckets: Sequence[Sequence[ParamMeta]], writers: int, scratch_bytes: int = 0) -> None:
        self.writers = writers
        self.buckets: list[list[Slot]] = []
        self.spans: list[tuple[int, int]] = []
        end = Board.nbytes(len(buckets), writers)
        for metas in buckets:
            start = end = aligned(end)
            slots = []
            for meta in metas:
                slots.append(Slot(meta, aligned(end)))
                end = slots[-1].offset + meta.nbytes
            self.buckets.append(slots)
            end = aligned(end)
            self.spans.append((start, end))
        self.scratch = end
        self._scratch_bytes = scratch_bytes
        self.nbytes = self.scratch + scratch_bytes

    def describe(self) -> dict[str, Any]:
        """As plain values, for `parse`."""
        metas = [slot.meta for bucket in self.buckets for slot in bucket]
        return {
            "names": [m.name for m in metas],
            "dtype_names": [str(m.dtype).removeprefix("torch.") for m in metas],
            "shapes": [list(m.shape) for m in metas],
            "buckets": [len(bucket) for bucket in self.buckets],
            "writers": self.writers,
            "scratch_bytes": self._scratch_bytes,
        }

    @classmethod
    def parse(
        cls,
        names: Sequence[str],
        dtype_names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        buckets: Sequence[int],
        writers: int,
        scratch_bytes: int,
    ) -> SharedLayout:
        """The layout that `describe` described. Raises ValueError when the lists do not fit together."""
        if sum(buckets) != len(names):
            raise ValueError(f"buckets of {sum(buckets)} tensors and {len(names)} names")
        metas = iter(
            ParamMeta(name, getattr(torch, dtype), tuple(shape))
            for name, dtype, shape in zip(names, dtype_names, shapes, strict=True)
        )
        return cls([[next(metas) for _ in range(count)] for count in buckets], writers, scratch_bytes)

    def piece(self, bucket: int, writer: int) -> tuple[int, int]:
        """The bytes of a bucket whose checksum a writer computes."""
        start, end = self.spans[bucket]
        step = aligned(-(-(end - start) // self.writers))
        return min(start + writer * step, end), min(start + (writer + 1) * step, end)


class Board:
    """The first bytes of the memory: who has done what in which round.

    Attributes:
        checksums: uint64 ``[buckets, writers]``: `checksum` of each writer's piece of each bucket.
    """

    def __init__(self, memory: torch.Tensor, buckets: int, writers: int) -> None:
        words = memory[: self.nbytes(buckets, writers)].view(torch.int64).numpy()
        self._abandoned, self._begun = words[:1], words[1 : 1 + writers]
        rest = words[1 + writers :].reshape(4, buckets, writers)
        self._done, self.checksums = rest[:3], rest[3].view(np.uint64)

    @staticmethod
    def nbytes(buckets: int, writers: int) -> int:
        return 8 * (1 + writers + 4 * buckets * writers)

    def begin(self, writer: int, number: int) -> None:
        """Say, before the first byte of a round is written, that what was there is no longer whole."""
        self._begun[writer] = number

    def abandon(self, number: int) -> None:
        """Wake everyone who waits for something of this round."""
        self._abandoned[0] = number

    def mark(self, stage: int, bucket: int, writer: int, number: int) -> None:
        self._done[stage, bucket, writer] = number

    def wait(self, stage: int, bucket: int, number: int) -> None:
        """Wait until all writers have marked a bucket. Raises RoundLost, also after ``STALL_S``."""
        self._wait(lambda: (self._done[stage, bucket] == number).all(), f"bucket {bucket}", number)

    def wait_complete(self, number: int) -> None:
        """Wait until all buckets are ready. Raises RoundLost."""
        self._wait(lambda: (self._done[SUMMED] == number).all(), "all buckets", number)

    def check_current(self, number: int) -> None:
        """Raise RoundLost when a writer has begun a later round."""
        if (self._begun > number).any():
            raise RoundLost(f"round {number} was overwritten by round {self._begun.max()}")

    def _wait(self, ready: Callable[[], np.bool_], what: str, number: int) -> None:
        deadline = time.monotonic() + STALL_S
        while not ready():
            self.check_current(number)
            if self._abandoned[0] == number:
                raise RoundLost(f"the trainer gave round {number} up")
            if time.monotonic() > deadline:
                raise RoundLost(f"{what} of round {number} did not come within {STALL_S:.0f} s")
            time.sleep(_POLL_S)


def aligned(offset: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def view_in(memory: torch.Tensor, offset: int, meta: ParamMeta) -> torch.Tensor:
    """The tensor that lies at byte ``offset`` of uint8 memory; no copy."""
    return memory[offset : offset + meta.nbytes].view(meta.dtype).view(meta.shape)


def checksum(memory: torch.Tensor) -> int:
    """Fletcher's checksum (1982) of uint8 memory: 64-bit words added in blocks, the blocks with weights 1, 3, 5…

    Of the whole modulo 2**64. It finds every change of one word and blocks in the wrong place, at the speed of memory;
    CRC-32 is eight times as slow. Other threads run meanwhile.

    Args:
        memory: contiguous, a multiple of 8 bytes, aligned to 8.
    """
    words = memory.numpy().view(np.uint64)
    whole = len(words) // _BLOCK_WORDS * _BLOCK_WORDS
    sums = np.append(np.add.reduce(words[:whole].reshape(-1, _BLOCK_WORDS), axis=1), np.add.reduce(words[whole:]))
    return int((sums * np.arange(1, 2 * len(sums), 2, dtype=np.uint64)).sum())


def make_buckets(groups: Sequence[Sequence[ParamMeta]]) -> list[list[ParamMeta]]:
    """Groups joined up to ``BUCKET_BYTES``; none is split, since an engine loads a layer when it is complete.

    The first group (the embedding, often larger than a layer) comes last: engines begin sooner.
    """
    buckets: list[list[ParamMeta]] = []
    size = 0
    for group in (*groups[1:], *groups[:1]):
        nbytes = sum(meta.nbytes for meta in group)
        if not buckets or size + nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1] += group
        size += nbytes
    return buckets


def map_memory(path: str, nbytes: int) -> torch.Tensor:
    """The whole file as shared uint8 memory ``[nbytes]``. Raises RuntimeError when it cannot be mapped."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
