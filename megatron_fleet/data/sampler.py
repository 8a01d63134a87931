"""PromptSampler: which tasks come next, exactly resumable."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.data.task import Task


class PromptSampler:
    """Batches of tasks; every task once per epoch, in an order that depends on seed and epoch alone.

    A batch may span the end of an epoch. Only a task set smaller than the batch repeats tasks within one.
    """

    def __init__(self, tasks: Sequence[Task], batch: int, seed: int) -> None:
        """Raises UserError when there is no task."""
        if not tasks:
            raise UserError("data: no task is left for training; lower data.eval_fraction or give more tasks.")
        # By key, so that the order of rows in the file does not matter.
        self._tasks = sorted(tasks, key=lambda task: task.key)
        self._batch = batch
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    def next(self) -> list[Task]:
        """The next ``batch`` tasks."""
        picked: list[Task] = []
        while len(picked) < self._batch:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._shuffled(self._epoch)
            picked.append(self._tasks[self._order[self._position]])
            self._position += 1
        return picked

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable; a sampler that loads it goes on with the same tasks."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "tasks": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            UserError: the state belongs to other tasks or another seed, so going on would repeat or skip some.
        """
        if state["tasks"] != self._fingerprint() or state["seed"] != self._seed:
            raise UserError(
                "The checkpoint's data cursor belongs to other training tasks or another run.seed; resume with that "
                "run's task file, data.eval_fraction and seed, or start fresh with run.resume=never."
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> np.ndarray:
        """int64 ``[tasks]``: the order of one epoch."""
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks))

    def _fingerprint(self) -> str:
        return hashlib.sha256("\n".join(task.key for task in self._tasks).encode()).hexdigest()[:16]
