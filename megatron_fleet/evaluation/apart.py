"""Evaluations on dedicated engines (``eval.engines``) during training, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol, final

from megatron_fleet.evaluation.evaluator import Evaluation
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.platform.waiting import unless, until_done
from megatron_fleet.rollout.requests import EngineKind, EnvironmentFailed, RolloutFailed

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two looks at evaluation engines that are replaced."""


class Postponed(Exception):
    """An evaluation cannot be made with the weights that it was to evaluate. The message says why."""


class EvaluationEngines(Protocol):
    """The part of `loop.engine_weights.EngineWeights` that is used."""

    def can_send_for_evaluation(self) -> bool: ...

    async def send_for_evaluation(self, version: int) -> None: ...

    async def lost_for_evaluation(self) -> None: ...


class Plays(Protocol):
    """The part of `evaluation.evaluator.Evaluator` that is used."""

    async def play(self, show: None, engines: EngineKind) -> Evaluation: ...


Record = Callable[[int, Evaluation, Mapping[str, float]], None]
"""Records an evaluation of a step's weights, with further metrics."""


@final
class EvaluationsApart:
    """Evaluations that run during training.

    Attributes:
        due: step whose weights, which the trainer has, are to be sent to the engines.
        playing: step whose weights the engines have, or are being sent; it is being evaluated.
        postponed: evaluation that could not be made, for which newer weights are to make up: its step, and why.
        given_up: why the engines play no more evaluations; ``None`` while they do.
    """

    def __init__(self, engines: EvaluationEngines, evaluator: Plays, record: Record) -> None:
        self._engines, self._evaluator, self._record = engines, evaluator, record
        self.due: int | None = None
        self.playing: int | None = None
        self.postponed: tuple[int, str] | None = None
        self.given_up: str | None = None
        self._work: asyncio.Task[None] | None = None
        self._sent = asyncio.Event()  # set while the trainer's weights may change
        self._sent.set()
        self._hurry = asyncio.Event()
        self._due_since = 0.0
        self._waited = 0.0
        self._waiting_since: float | None = None

    def start(self, step: int) -> None:
        """Evaluate the weights of ``step``, which the trainer has, once the evaluation before has ended."""
        self.due, self._due_since = step, time.monotonic()
        self._sent.clear()
        if self._work is None:
            self._work = asyncio.create_task(self._evaluate_all())

    def look(self) -> None:
        """Raise what an evaluation raised."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            work.result()

    async def until_sent(self) -> None:
        """Wait until the trainer's weights may change, because the engines have those that are due. An evaluation for
        which an engine has to be replaced first is postponed instead. Cancelled, nothing changes.

        Raises: as `look`.
        """
        if not self._sent.is_set():
            self._waiting_since = time.monotonic()
            sent = asyncio.create_task(self._sent.wait())
            try:
                with TIMELINE.phase("eval_wait"):
                    while not sent.done() and self._work is not None and not self._work.done():
                        if not self._ready():
                            self._hurry.set()
                        await asyncio.wait((sent, self._work), timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sent.cancel()
                self._waited, self._waiting_since = self._read_wait(), None
        self.look()

    async def finish(self) -> None:
        """Wait until nothing is left to evaluate. Cancelled, nothing changes. Raises: as `look`."""
        if self._work is not None:
            self._waiting_since = time.monotonic()
            try:
                with TIMELINE.phase("eval_wait"):
                    await asyncio.wait((self._work,))
            finally:
                self._waited, self._waiting_since = self._read_wait(), None
        self.look()

    async def close(self) -> None:
        """Stop; what has not ended stays due or playing. Idempotent."""
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            try:
                await until_done(work)
            finally:
                if not work.cancelled():
                    work.exception()  # the end of the attempt has a reason of its own

    def _ready(self) -> bool:
        with contextlib.suppress(RolloutFailed):  # raised in `_send`, too
            return self._engines.can_send_for_evaluation()
        return True

    def _read_wait(self) -> float:
        """Return the seconds that training has waited for evaluations since the last call."""
        now, since = time.monotonic(), self._waiting_since
        waited, self._waited = self._waited + (0.0 if since is None else now - since), 0.0
        if since is not None:
            self._waiting_since = now
        return waited

    async def _evaluate_all(self) -> None:
        try:
            while self.due is not None:
                (step, self.due), since = (self.due, None), self._due_since
                self.playing = step
                self._hurry.clear()
                try:
                    evaluation = await self._evaluate(step)
                except Postponed as reason:
                    if self.due is None:
                        self.postponed = step, str(reason)
                    else:
                        said = "the evaluation of step %d could not be made: %s. That of step %d follows"
                        log.warning(said, step, reason, self.due)
                except EnvironmentFailed:
                    raise
                except RolloutFailed as error:
                    newest, self.due = step if self.due is None else self.due, None
                    self.postponed, self.given_up = (newest, str(error)), str(error)
                else:
                    lag = {"eval/lag_s": time.monotonic() - since, "timing/eval_wait": self._read_wait()}
                    self._record(step, evaluation, lag)
                self.playing = None
        finally:
            self._sent.set()

    async def _evaluate(self, step: int) -> Evaluation:
        await unless(self._send(step), self._hurried())
        self._sent.set()
        return await unless(self._evaluator.play(None, "eval"), self._lost())

    async def _send(self, step: int) -> None:
        while not self._engines.can_send_for_evaluation():
            await asyncio.sleep(POLL_S)
        await self._engines.send_for_evaluation(step)

    async def _hurried(self) -> Postponed:
        await self._hurry.wait()
        return Postponed("an evaluation engine is being replaced, and the trainer's weights are about to change")

    async def _lost(self) -> Postponed:
        """Wait until a restarted engine cannot get its weights again, or the next evaluation waits for a restart."""
        waits = [asyncio.create_task(self._hurry.wait()), asyncio.create_task(self._engines.lost_for_evaluation())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return Postponed("an evaluation engine was lost, and the trainer has newer weights by now")
