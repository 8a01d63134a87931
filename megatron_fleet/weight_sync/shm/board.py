"""Progress board at the start of the shared memory: the state of each bucket per writer. Nothing here imports torch.

Writers fill the buckets in order while engines load the ones that are ready. Only the board signals readiness: one
message per bucket would cost more than writing the bucket. A *round* is one attempt to send weights, numbered from 1.
The board works like a seqlock: data is valid only if no writer has begun another round by the end of the read.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

STALL_S = 600.0
"""Timeout of a writer or engine that waits for another one."""
_POLL_S = 1e-4

WRITTEN, ENCODED, SUMMED = range(3)
"""Stages of a bucket in a round."""


class RoundLost(RuntimeError):
    """The round cannot be completed, or can no longer be read."""


class Board:
    """View of the board in memory that several processes map.

    Attributes:
        checksums: uint64 ``[buckets, writers]``: checksum of each writer's piece of each bucket.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], buckets: int, writers: int) -> None:
        """Args: ``memory``: ``[n]``, shared, with the board at its start."""
        words = memory[: self.nbytes(buckets, writers)].view(np.int64)
        self._abandoned, self._begun = words[:1], words[1 : 1 + writers]
        rest = words[1 + writers :].reshape(4, buckets, writers)
        self._done, self.checksums = rest[:3], rest[3].view(np.uint64)

    @staticmethod
    def nbytes(buckets: int, writers: int) -> int:
        """Size of a board in bytes."""
        return 8 * (1 + writers + 4 * buckets * writers)

    def begin(self, writer: int, number: int) -> None:
        """Invalidate the previous round, before the first byte of this one is written."""
        self._begun[writer] = number

    def abandon(self, number: int) -> None:
        """Wake all processes that wait for this round."""
        self._abandoned[0] = number

    def mark(self, stage: int, bucket: int, writer: int, number: int) -> None:
        """Record that a writer has finished a stage of a bucket."""
        self._done[stage, bucket, writer] = number

    def wait(self, stage: int, bucket: int, number: int) -> None:
        """Wait until all writers have marked a bucket. Raises RoundLost, including after ``STALL_S``."""
        deadline = time.monotonic() + STALL_S
        while not (self._done[stage, bucket] == number).all():
            self.check_current(number)
            if self._abandoned[0] == number:
                raise RoundLost(f"the trainer abandoned round {number}")
            if time.monotonic() > deadline:
                raise RoundLost(f"bucket {bucket} of round {number} was not sent within {STALL_S:g} s")
            time.sleep(_POLL_S)

    def check_current(self, number: int) -> None:
        """Raise RoundLost if a writer has begun a later round."""
        if (self._begun > number).any():
            raise RoundLost(f"round {number} was overwritten by round {self._begun.max()}")
