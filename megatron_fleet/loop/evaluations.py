"""When held-out tasks are evaluated: at once, or in the background while the trainer computes; and what is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, final

from megatron_fleet.config.schema import Config
from megatron_fleet.evaluation.evaluator import Evaluation

ShowPhase = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class Evaluates(Protocol):
    """The part of `evaluation.evaluator.Evaluator` that is used."""

    async def play(self, show: ShowPhase) -> Evaluation: ...

    def start(self) -> None: ...

    async def finish(self) -> Evaluation: ...

    async def close(self) -> None: ...


class EvaluationRecords(Protocol):
    """The part of `loop.records.Records` that is used."""

    def phase(self, name: str, total: int = 0) -> AbstractContextManager[Callable[[int], None]]: ...

    def episodes_of(self, step: int, evaluation: Evaluation) -> dict[str, float]: ...

    def evaluation(self, step: int, metrics: dict[str, float], in_step: bool = False) -> None: ...


@final
class Evaluations:
    """Evaluates the weights of a step before they change.

    Attributes:
        due: step whose weights are still to be evaluated in the background; part of a checkpoint.
    """

    def __init__(self, config: Config, evaluator: Evaluates, records: EvaluationRecords) -> None:
        self._config, self._evaluator, self._records = config, evaluator, records
        self.due: int | None = None
        self._running: int | None = None

    async def of_step(self, step: int) -> dict[str, float]:
        """Evaluate the weights of ``step`` now and return the metrics; none when it is to be done later."""
        if self._config.eval.overlap and step < self._config.run.steps:  # after the last step there is nothing to hide
            self.due = step
            return {}
        return self._records.episodes_of(step, await self._evaluator.play(self._records.phase))

    async def before_training(self) -> None:
        """Evaluate the initial weights, recorded as step 0."""
        if metrics := await self.of_step(0):
            self._records.evaluation(0, metrics)

    async def catch_up(self) -> None:
        """Evaluate now what was due when a run was resumed that does not overlap any more."""
        if self.due is not None and not self._config.eval.overlap:
            step, self.due = self.due, None
            self._records.evaluation(
                step, self._records.episodes_of(step, await self._evaluator.play(self._records.phase))
            )

    def start_due(self) -> None:
        """Begin in the background: the engines have the weights and nothing to do until the next ones come."""
        if self.due is not None:
            self._running, self.due = self.due, None
            self._evaluator.start()

    async def finish(self) -> None:
        """Wait for the evaluation in the background: the weights are about to change."""
        if self._running is None:
            return
        began = time.monotonic()
        evaluation = await self._evaluator.finish()
        step, self._running = self._running, None
        waited = time.monotonic() - began
        metrics = self._records.episodes_of(step, evaluation)
        self._records.evaluation(step, metrics | {"timing/eval_wait": waited}, in_step=True)

    def due_after(self, step: int) -> bool:
        """Evaluate after ``step`` steps?"""
        if step == self._config.run.steps:
            return self._config.eval.at_end
        return self._config.eval.interval > 0 and step % self._config.eval.interval == 0

    async def close(self) -> None:
        """Stop what runs in the background. Idempotent."""
        await self._evaluator.close()
