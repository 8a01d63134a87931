"""Split tasks into training and evaluation by a hash of the key alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from megatron_fleet.data.task import Task


def key_hash(key: str) -> float:
    """A number in [0, 1): the first 8 bytes, big-endian, of MD5(key). Fleet's split uses the same one."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:8], "big") / 2**64


def split(tasks: Iterable[Task], eval_fraction: float) -> tuple[list[Task], list[Task]]:
    """(training, evaluation), each in file order.

    The threshold is fixed, so a task never changes sides when others come or go, and a larger fraction only moves
    tasks from training to evaluation. The share that comes out is binomial around ``eval_fraction``.
    """
    train: list[Task] = []
    held_out: list[Task] = []
    for task in tasks:
        (held_out if key_hash(task.key) < eval_fraction else train).append(task)
    return train, held_out
