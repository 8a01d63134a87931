"""Training loop of the controller: play, update, sync weights, record; evaluate and save when due."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, final

from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.config.schema import Config
from megatron_fleet.loop.attempt import Attempt, OpenAttempt
from megatron_fleet.loop.batches import Outage, StepBatch
from megatron_fleet.loop.guard import StepGuard
from megatron_fleet.loop.saves import Saves
from megatron_fleet.loop.stopping import Stopped, StopRequest
from megatron_fleet.loop.update import update
from megatron_fleet.loop.weights import EngineWeights
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.platform.waiting import unless
from megatron_fleet.rollout.requests import EnvironmentFailed
from megatron_fleet.trainer.base import Trainer, TrainerLost

T = TypeVar("T")


@final
class Training:
    """Training of one run. All dependencies are passed in, so that tests can use fakes."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        engines: EngineWeights,
        open_attempt: OpenAttempt,
        saves: Saves,
        stop: StopRequest,
    ) -> None:
        """
        Args:
            open_attempt: opens an `Attempt` from the state of a checkpoint, or from scratch.
            stop: when asked, training saves and raises `Stopped`.
        """
        self._config, self._trainer, self._engines, self._open = config, trainer, engines, open_attempt
        self._saves, self._stop = saves, stop
        self._attempt: Attempt
        self._guard: StepGuard
        self._step = 0

    async def run(self, found: Checkpoint | None) -> None:
        """Train to the end. A trainer that dies is restarted and resumes from the last checkpoint.

        Args:
            found: checkpoint to start from, see `loop.start.find_start`.

        Raises:
            UserError: a problem that the user can fix; the run can be resumed.
            Stopped: the run was asked to end.
        """
        start: Coroutine[Any, Any, None] = self._engines.start()
        while True:
            try:
                await start
                return await until_lost(self._trainer, self._from_checkpoint(found))
            except TrainerLost as reason:
                found = await self._saves.newest(found)
                start = self._engines.restart(reason)

    async def _from_checkpoint(self, found: Checkpoint | None) -> None:
        state = None if found is None else found.trainer_state()
        if self._config.algorithm.kl.coef > 0:
            await self._trainer.keep_reference()
        await self._saves.resume(found)
        self._guard = StepGuard(self._config, self._trainer)
        if state is not None:
            self._guard.load(state["guard"])
        self._step = 0 if state is None else int(state["step"])
        self._saves.saved_step = None if state is None else self._step
        async with self._open(state) as self._attempt:
            try:
                await self._steps()
            except Stopped:
                await self._save_before_the_end()
                raise
            finally:
                await self._saves.leave()

    async def _steps(self) -> None:
        config, attempt = self._config, self._attempt
        self._stop.heeded = True
        await self._engines.update(self._step)
        if self._step == 0 and config.eval.at_start:
            await self._stop.interrupt(attempt.evaluations.before_training())
        while self._step < config.run.last_step:
            await self._one_step()
        await self._saves.finish()
        if config.checkpoint.export.last:
            await self._engines.to_trainer()
            await self._trainer.export_hf(Path(config.run.out) / "hf")
        attempt.records.finish()
        TIMELINE.finish(self._step)

    async def _one_step(self) -> None:
        config, attempt, clock = self._config, self._attempt, Clock()
        TIMELINE.begin_step(self._step)
        await self._saves.finish(wait=False)
        batch = await self._stop.interrupt(self._next_batch())
        attempt.evaluations.start_due()
        attempt.records.show("training")
        await self._engines.to_trainer()
        with clock.phase("policy_train"):
            reports = await update(config, self._trainer, self._guard, batch.updates, self._step)
        await attempt.evaluations.finish()
        self._step += 1
        with clock.phase("sync_weights"):
            difference = await self._engines.update(self._step)
        evaluation = {}
        seconds = clock.read() | self._engines.read_seconds()
        attempt.batches.trained(batch.groups)
        attempt.records.trajectories(self._step, batch.groups)
        if attempt.evaluations.due_after(self._step):
            evaluation = await self._stop.interrupt(attempt.evaluations.of_step(self._step))
        more = self._engines.memory() | await self._engines.statistics() | evaluation | self._saves.metrics()
        attempt.finish_step(self._step, batch, reports, seconds, more, difference)
        if checkpoint_due(config, self._step) or self._guard.stuck:
            await self._save()
        if self._guard.stuck:
            await self._saves.finish()
        self._guard.stop_if_stuck()

    async def _next_batch(self) -> StepBatch:
        await self._attempt.evaluations.catch_up()
        try:
            return await self._attempt.next_batch(self._step)
        except (Outage, EnvironmentFailed):
            if self._step > 0:
                await self._save()
                await self._saves.finish()
            raise

    async def _save(self) -> None:
        clock = Clock()
        state = {"step": self._step, "guard": self._guard.state(), **self._attempt.state()}
        with clock.phase("save_checkpoints"):
            async with self._engines.borrowed(self._step):
                if self._config.checkpoint.export.check:
                    state["probe"] = await self._engines.probe()
                begun = await self._saves.begin(self._step, state)
        if begun:
            self._attempt.records.add(self._step, {f"timing/{k}": v for k, v in clock.seconds.items()})

    async def _save_before_the_end(self) -> None:
        """Save what is not saved yet, and tell from which step the run goes on."""
        await self._saves.finish()
        if self._step > 0 and self._step != self._saves.saved_step:
            await self._save()
            await self._saves.finish()
        if self._step == self._saves.saved_step:
            self._stop.saved_step = self._step


async def until_lost(trainer: Trainer, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; cancel it, wait until it has ended, and raise TrainerLost when the trainer is lost."""
    return await unless(work, trainer.lost())


def checkpoint_due(config: Config, step: int) -> bool:
    """Return whether to save after ``step`` steps; always true after the last one."""
    return step == config.run.last_step or (config.checkpoint.interval > 0 and step % config.checkpoint.interval == 0)


@dataclass
class Clock:
    """Durations of the phases of one step, in seconds."""

    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the duration of the block, which is a phase of the timeline."""
        began = time.monotonic()
        with TIMELINE.phase(name):
            yield
        self.seconds[name] = time.monotonic() - began

    def read(self) -> dict[str, float]:
        """Return the seconds of the phases so far, and as ``step`` those since the clock's start."""
        return {**self.seconds, "step": time.monotonic() - self.began}
