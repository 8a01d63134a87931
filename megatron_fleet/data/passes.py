"""Passes over the tasks of one environment, each in an order of its own, with tasks left out for a while."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from megatron_fleet.data.task import Task


@final
class Passes:
    """Hands out tasks one after the other; no task comes twice before the pass is over.

    The order of a pass depends on seed, environment and number of the pass alone. A task that is deferred is left out
    of the passes that follow; a pass in which all are deferred has all of them.
    """

    def __init__(self, env_key: str, tasks: Sequence[Task], seed: int) -> None:
        # By key, so that the order of rows in the file does not matter.
        self._tasks = sorted(tasks, key=lambda task: task.key)
        self._seed = [seed, int.from_bytes(hashlib.blake2b(env_key.encode(), digest_size=8).digest(), "big")]
        self._deferred: dict[str, int] = {}
        self._drawn = 0
        self._begin(0, frozenset())

    @property
    def drawn(self) -> int:
        """Tasks handed out so far."""
        return self._drawn

    @property
    def epoch(self) -> float:
        """Passes that were begun before this one, and the part of this one that is over."""
        return self._number + self._position / len(self._order)

    @property
    def left_out(self) -> int:
        """Tasks that this pass leaves out."""
        return len(self._left_out)

    def take(self, count: int) -> list[Task]:
        """The next ``count`` tasks."""
        taken: list[Task] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._begin(self._number + 1, self._due(self._number + 1))
            taken.append(self._order[self._position])
            self._position += 1
        self._drawn += count
        return taken

    def defer(self, key: str, passes: int) -> None:
        """Leave a task out of the next ``passes`` passes; the one under way stays as it is."""
        self._deferred[key] = self._number + passes

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {
            "drawn": self._drawn,
            "pass": self._number,
            "position": self._position,
            "left_out": sorted(self._left_out),
            "deferred": self._deferred,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, with the same tasks and seed."""
        self._begin(int(state["pass"]), frozenset(state["left_out"]))
        self._position, self._drawn = int(state["position"]), int(state["drawn"])
        self._deferred = {str(key): int(last) for key, last in state["deferred"].items()}

    def _begin(self, number: int, left_out: frozenset[str]) -> None:
        order = np.random.default_rng([*self._seed, number]).permutation(len(self._tasks))
        self._number, self._position, self._left_out = number, 0, left_out
        self._order = [self._tasks[i] for i in order if self._tasks[i].key not in left_out]

    def _due(self, number: int) -> frozenset[str]:
        """Tasks that pass ``number`` leaves out."""
        self._deferred = {key: last for key, last in self._deferred.items() if last >= number}
        return frozenset(self._deferred) if len(self._deferred) < len(self._tasks) else frozenset()
