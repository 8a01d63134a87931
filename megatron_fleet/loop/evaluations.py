"""Evaluation of held-out tasks during a run, in the foreground or in the background while the trainer computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, final

from megatron_fleet.config.schema import Config
from megatron_fleet.evaluation.evaluator import Evaluation
from megatron_fleet.platform.timeline import TIMELINE

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
    """Evaluate the weights of a step before they change.

    Attributes:
        due: step whose weights still have to be evaluated in the background; part of a checkpoint.
    """

    def __init__(self, config: Config, evaluator: Evaluates, records: EvaluationRecords) -> None:
        self._config, self._evaluator, self._records = config, evaluator, records
        self.due: int | None = None
        self._running: int | None = None

    async def of_step(self, step: int) -> dict[str, float]:
        """Evaluate the weights of ``step`` now and return the metrics; empty when the evaluation is deferred."""
        # After the last step there is nothing to hide it behind.
        if self._config.eval.overlap and step < self._config.run.last_step:
            self.due = step
            return {}
        return self._records.episodes_of(step, await self._evaluator.play(self._records.phase))

    async def before_training(self) -> None:
        """Evaluate the initial weights, recorded as step 0."""
        if metrics := await self.of_step(0):
            self._records.evaluation(0, metrics)

    async def catch_up(self) -> None:
        """Run the evaluation that was due when the run was resumed, if ``eval.overlap`` has been turned off since."""
        if self.due is not None and not self._config.eval.overlap:
            step, self.due = self.due, None
            self._records.evaluation(
                step, self._records.episodes_of(step, await self._evaluator.play(self._records.phase))
            )

    def start_due(self) -> None:
        """Start the due evaluation in the background: the engines are idle until the next weight sync."""
        if self.due is not None:
            self._running, self.due = self.due, None
            self._evaluator.start()

    async def finish(self) -> None:
        """Wait for the background evaluation, because the weights are about to change."""
        if self._running is None:
            return
        began = time.monotonic()
        with TIMELINE.phase("eval_wait"):
            evaluation = await self._evaluator.finish()
        step, self._running = self._running, None
        waited = time.monotonic() - began
        metrics = self._records.episodes_of(step, evaluation)
        self._records.evaluation(step, metrics | {"timing/eval_wait": waited}, in_step=True)

    def due_after(self, step: int) -> bool:
        """Return whether an evaluation is due after ``step`` steps."""
        if step == self._config.run.last_step:
            return self._config.eval.at_end
        return self._config.eval.interval > 0 and step % self._config.eval.interval == 0

    async def close(self) -> None:
        """Stop the background evaluation. Idempotent."""
        await self._evaluator.close()
