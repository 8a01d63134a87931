"""The first bytes of the shared memory: who has done what with which bucket. Nothing here imports torch.

Writers fill one bucket after another; engines load the ones that are ready meanwhile. Only the board says so: a message
per bucket would cost more than writing the bucket. A *round* is one attempt to send weights, numbered from 1. The board
works like a seqlock: what is read counts only if no writer has begun another round by the end.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

STALL_S = 600.0
"""A writer or engine that waits longer for another one gives up."""
_POLL_S = 1e-4

WRITTEN, ENCODED, SUMMED = range(3)
"""Stages of a bucket in a round."""


class RoundLost(RuntimeError):
    """The round cannot be completed, or can no longer be read."""


class Board:
    """A view of the board in memory that several processes map.

    Attributes:
        checksums: uint64 ``[buckets, writers]``: the checksum of each writer's piece of each bucket.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], buckets: int, writers: int) -> None:
        """Args: ``memory``: ``[n]``, shared, which begins with the board."""
        words = memory[: self.nbytes(buckets, writers)].view(np.int64)
        self._abandoned, self._begun = words[:1], words[1 : 1 + writers]
        rest = words[1 + writers :].reshape(4, buckets, writers)
        self._done, self.checksums = rest[:3], rest[3].view(np.uint64)

    @staticmethod
    def nbytes(buckets: int, writers: int) -> int:
        """Bytes that a board takes."""
        return 8 * (1 + writers + 4 * buckets * writers)

    def begin(self, writer: int, number: int) -> None:
        """Say, before the first byte of a round is written, that the earlier one is no longer whole."""
        self._begun[writer] = number

    def abandon(self, number: int) -> None:
        """Wake everyone who waits for something of this round."""
        self._abandoned[0] = number

    def mark(self, stage: int, bucket: int, writer: int, number: int) -> None:
        """Say that a writer is through with a stage of a bucket."""
        self._done[stage, bucket, writer] = number

    def wait(self, stage: int, bucket: int, number: int) -> None:
        """Wait until all writers have marked a bucket. Raises RoundLost, also after ``STALL_S``."""
        deadline = time.monotonic() + STALL_S
        while not (self._done[stage, bucket] == number).all():
            self.check_current(number)
            if self._abandoned[0] == number:
                raise RoundLost(f"the trainer gave round {number} up")
            if time.monotonic() > deadline:
                raise RoundLost(f"bucket {bucket} of round {number} did not come within {STALL_S:.0f} s")
            time.sleep(_POLL_S)

    def check_current(self, number: int) -> None:
        """Raise RoundLost when a writer has begun a later round."""
        if (self._begun > number).any():
            raise RoundLost(f"round {number} was overwritten by round {self._begun.max()}")
