"""Evaluation of held-out tasks during a run: between steps, or beside training (``eval.overlap``, ``eval.engines``)."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Protocol, final

from megatron_fleet.config.schema import EvalConfig
from megatron_fleet.evaluation.apart import EvaluationEngines, EvaluationsApart
from megatron_fleet.evaluation.evaluator import Evaluation
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.rollout.requests import EngineKind

log = logging.getLogger(__name__)

Interrupt = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]
ShowPhase = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class Evaluates(Protocol):
    """The part of `evaluation.evaluator.Evaluator` that is used."""

    async def play(self, show: ShowPhase | None, engines: EngineKind = "rollout") -> Evaluation: ...

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
        self,
        config: EvalConfig,
        last_step: int,
        evaluator: Evaluates,
        records: EvaluationRecords,
        colocated: bool,
        engines: EvaluationEngines | None = None,
        step: int = 0,
    ) -> None:
        """
        Args:
            colocated: engines sleep while the trainer computes.
            engines: those that play evaluations only, if there are any.
            step: of the weights from which this attempt begins.
        """
        self._config, self._last_step, self._evaluator, self._records = config, last_step, evaluator, records
        self._colocated, self._step = colocated, step
        self._apart = None if engines is None else EvaluationsApart(engines, evaluator, self._record_apart)
        self.due: int | None = None
        self._running: int | None = None

    @property
    def unfinished(self) -> int | None:
        """Newest step whose weights still have to be evaluated, or are being evaluated; part of a checkpoint."""
        apart = self._apart
        of_apart = [] if apart is None else [apart.due, apart.playing, apart.postponed and apart.postponed[0]]
        return next((step for step in (self.due, self._running, *of_apart) if step is not None), None)

    def decide(self, step: int) -> None:
        """Make the evaluation of the weights of ``step`` due, if the configuration wants one, or one of older weights
        could not be made.
        """
        self._step = step
        if step == 0:
            wanted = self._config.at_start
        elif step == self._last_step:
            wanted = self._config.at_end
        else:
            wanted = self._config.interval > 0 and step % self._config.interval == 0
        if self._take_postponed() or wanted:
            self.due = step

    async def catch_up(self) -> None:
        """Make the evaluation that is due, unless it is left to be made beside training. Cancelled, it stays due."""
        if self._apart is not None:
            await self._catch_up_apart(self._apart)
        # After the last step there is nothing to hide it behind.
        if self.due is None or (self._config.overlap and self.due < self._last_step):
            return
        evaluation = await self._evaluator.play(self._records.phase)
        step, self.due = self.due, None
        self._records.evaluation(step, self._records.episodes_of(step, evaluation))

    @asynccontextmanager
    async def beside_update(self, interrupt: Interrupt) -> AsyncIterator[None]:
        """Make the evaluation that is due while the block updates the weights, and wait for it at the end of the block.
        The engines, which are idle until the next sync, hold the weights from before. Colocated ones sleep. Evaluation
        engines are only waited for at the beginning, until they have the weights that are due.

        Args:
            interrupt: awaits, and raises when the run is to stop.
        """
        if self._apart is not None:
            await interrupt(self._apart.until_sent())
        elif not self._colocated:
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
        if self._apart is not None:
            await self._apart.close()
        await self._evaluator.close()

    async def _catch_up_apart(self, apart: EvaluationsApart) -> None:
        """Leave what is due to the evaluation engines, or, after the last step, wait until they have finished: what is
        due then is played by the engines of the rollout, which are idle, and more. So is all that is due once
        evaluation engines have been given up.
        """
        if self._step >= self._last_step:
            await apart.finish()
            if self._take_postponed():
                self.due = self._step
        apart.look()
        if self.due is not None and self._step < self._last_step and apart.given_up is None:
            apart.start(self.due)
            self.due = None

    def _take_postponed(self) -> bool:
        """Return whether evaluation engines could not make an evaluation, which newer weights are to make up for."""
        apart = self._apart
        if apart is None or apart.postponed is None:
            return False
        (step, reason), apart.postponed = apart.postponed, None
        then = "; evaluations are played by the engines of the rollout from now on" if apart.given_up else ""
        log.warning(
            "the evaluation of step %d could not be made: %s. The weights of step %d are evaluated instead%s",
            *(step, reason, self._step, then),
        )
        return True

    def _record_apart(self, step: int, evaluation: Evaluation, more: Mapping[str, float]) -> None:
        metrics = self._records.episodes_of(step, evaluation) | {"eval/lag_steps": float(self._step - step), **more}
        self._records.evaluation(step, metrics, in_step=True)
