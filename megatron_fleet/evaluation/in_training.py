"""Evaluation of held-out tasks during a run: between steps, or beside training (``eval.overlap``)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Protocol, final

from megatron_fleet.config.schema import EvalConfig
from megatron_fleet.evaluation.evaluator import Evaluation
from megatron_fleet.platform.timeline import TIMELINE

Interrupt = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
ShowPhase = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class Evaluates(Protocol):
    """The part of `evaluation.evaluator.Evaluator` that is used."""

    async def play(self, show: ShowPhase) -> Evaluation: ...

    def start(self, follows: int | None = None) -> None: ...

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
        due: step whose weights, which are the engines', still have to be evaluated.
    """

    def __init__(
        self, config: EvalConfig, last_step: int, evaluator: Evaluates, records: EvaluationRecords, colocated: bool
    ) -> None:
        """Args: ``colocated``: engines sleep while the trainer computes."""
        self._config, self._last_step, self._evaluator, self._records = config, last_step, evaluator, records
        self._colocated = colocated
        self.due: int | None = None
        self._running: int | None = None

    @property
    def unfinished(self) -> int | None:
        """Step whose weights still have to be evaluated, or are being evaluated; part of a checkpoint."""
        return self._running if self.due is None else self.due

    def decide(self, step: int) -> None:
        """Make the evaluation of the weights of ``step`` due, if the configuration wants one."""
        if step == 0:
            wanted = self._config.at_start
        elif step == self._last_step:
            wanted = self._config.at_end
        else:
            wanted = self._config.interval > 0 and step % self._config.interval == 0
        if wanted:
            self.due = step

    async def catch_up(self) -> None:
        """Make the evaluation that is due, unless it is left to be made beside training. Cancelled, it stays due."""
        # After the last step there is nothing to hide it behind.
        if self.due is None or (self._config.overlap and self.due < self._last_step):
            return
        evaluation = await self._evaluator.play(self._records.phase)
        step, self.due = self.due, None
        self._records.evaluation(step, self._records.episodes_of(step, evaluation))

    @asynccontextmanager
    async def beside_update(self, interrupt: Interrupt) -> AsyncIterator[None]:
        """Make the evaluation that is due while the block updates the weights, and wait for it at the end of the block.
        The engines, which are idle until the next sync, hold the weights from before. Colocated ones sleep.

        Args:
            interrupt: awaits, and raises when the run is to stop.
        """
        if not self._colocated:
            self._start()
        yield
        await interrupt(self._finish())

    @asynccontextmanager
    async def beside_rollout(self) -> AsyncIterator[None]:
        """With colocated engines, make the evaluation that is due while the block plays the step after it, in the
        places that this step's groups leave free, and wait for it at the end of the block. Both play with the same
        weights.
        """
        if self._colocated:
            self._start(follows=self.due)
        yield
        await self._finish()

    def _start(self, follows: int | None = None) -> None:
        if self.due is not None:
            self._running, self.due = self.due, None
            self._evaluator.start(follows)

    async def _finish(self) -> None:
        """Wait for the evaluation that is running, if there is one. Cancelled, it is stopped and stays unfinished."""
        if self._running is None:
            return
        began = time.monotonic()
        with TIMELINE.phase("eval_wait"):
            evaluation = await self._evaluator.finish()
        step, self._running = self._running, None
        waited = time.monotonic() - began
        metrics = self._records.episodes_of(step, evaluation)
        self._records.evaluation(step, metrics | {"timing/eval_wait": waited}, in_step=True)

    async def close(self) -> None:
        """Stop the background evaluation. Idempotent."""
        await self._evaluator.close()
