"""Passes over the tasks of one environment, each in its own order, with deferral of tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from megatron_fleet.data.task import Task


@final
class Passes:
    """Sequence of tasks in which no task repeats within a pass.

    The order of a pass depends only on seed, environment and pass number. A deferred task is left out of the following
    passes; a pass in which all tasks are deferred includes all of them.
    """

    def __init__(self, env_key: str, tasks: Sequence[Task], seed: int) -> None:
        # Sorted by key, so that the order of rows in the file does not matter.
        self._tasks = sorted(tasks, key=lambda task: task.key)
        self._seed = [seed, int.from_bytes(hashlib.blake2b(env_key.encode(), digest_size=8).digest(), "big")]
        self._deferred: dict[str, int] = {}
        self._drawn = 0
        self._begin(0, frozenset())

    @property
    def drawn(self) -> int:
        """Number of tasks drawn so far."""
        return self._drawn

    @property
    def epoch(self) -> float:
        """Number of earlier passes, plus the completed fraction of this one."""
        return self._number + self._position / len(self._order)

    @property
    def left_out(self) -> int:
        """Number of tasks that this pass leaves out."""
        return len(self._left_out)

    def take(self, count: int) -> list[Task]:
        """Draw the next ``count`` tasks."""
        taken: list[Task] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._begin(self._number + 1, self._due(self._number + 1))
            taken.append(self._order[self._position])
            self._position += 1
        self._drawn += count
        return taken

    def defer(self, key: str, passes: int) -> None:
        """Leave a task out of the next ``passes`` passes; the current one is unchanged."""
        self._deferred[key] = self._number + passes

    def state_dict(self) -> dict[str, Any]:
        """Return a JSON-serialisable state."""
        return {
            "drawn": self._drawn,
            "pass": self._number,
            "position": self._position,
            "left_out": sorted(self._left_out),
            "deferred": self._deferred,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``, with the same tasks and seed."""
        self._begin(int(state["pass"]), frozenset(state["left_out"]))
        self._position, self._drawn = int(state["position"]), int(state["drawn"])
        self._deferred = {str(key): int(last) for key, last in state["deferred"].items()}

    def _begin(self, number: int, left_out: frozenset[str]) -> None:
        order = np.random.default_rng([*self._seed, number]).permutation(len(self._tasks))
        self._number, self._position, self._left_out = number, 0, left_out
        self._order = [self._tasks[i] for i in order if self._tasks[i].key not in left_out]

    def _due(self, number: int) -> frozenset[str]:
        """Return the tasks that pass ``number`` leaves out."""
        self._deferred = {key: last for key, last in self._deferred.items() if last >= number}
        return frozenset(self._deferred) if len(self._deferred) < len(self._tasks) else frozenset()
