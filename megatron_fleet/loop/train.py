"""Training loop of the controller: play, update, sync weights, record; evaluate and save when due."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, final

from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.checkpoint.store import Replaced, Uploader
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.loop.attempt import Attempt, OpenAttempt
from megatron_fleet.loop.batches import Outage, StepBatch
from megatron_fleet.loop.guard import StepGuard
from megatron_fleet.loop.update import update
from megatron_fleet.loop.weights import EngineWeights
from megatron_fleet.platform.waiting import until_done
from megatron_fleet.rollout.requests import EnvironmentFailed
from megatron_fleet.trainer.base import Files, Trainer, TrainerLost

T = TypeVar("T")
log = logging.getLogger(__name__)


@final
class Training:
    """Training of one run. All dependencies are passed in, so that tests can use fakes."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        engines: EngineWeights,
        open_attempt: OpenAttempt,
        checkpoints: Checkpoints,
        uploader: Uploader | None = None,
    ) -> None:
        """
        Args:
            open_attempt: opens an `Attempt` from the state of a checkpoint, or from scratch.
            uploader: copies each checkpoint to a store.
        """
        self._config, self._trainer, self._engines, self._open = config, trainer, engines, open_attempt
        self._checkpoints, self._uploader = checkpoints, uploader
        self._attempt: Attempt
        self._guard: StepGuard
        self._step = self._failed_saves = 0
        self._saving: tuple[int, asyncio.Task[None]] | None = None

    async def run(self, found: Checkpoint | None) -> None:
        """Train to the end. A trainer that dies is restarted and resumes from the last checkpoint.

        Args:
            found: checkpoint to start from, see `loop.start.find_start`.

        Raises:
            UserError: a problem that the user can fix; the run can be resumed.
        """
        start: Coroutine[Any, Any, None] = self._engines.start()
        while True:
            try:
                await start
                return await until_lost(self._trainer, self._from_checkpoint(found))
            except TrainerLost as reason:
                found = await self._checkpoints.newest_in_thread()
                start = self._engines.restart(reason)

    async def _from_checkpoint(self, found: Checkpoint | None) -> None:
        state = None if found is None else found.trainer_state()
        if self._config.algorithm.kl.coef > 0:
            await self._trainer.keep_reference()
        if found is not None:
            await self._trainer.load_state(found.path)
        self._guard = StepGuard(self._config, self._trainer)
        if state is not None:
            self._guard.load(state["guard"])
        self._step = 0 if state is None else int(state["step"])
        async with self._open(state) as self._attempt:
            try:
                await self._steps()
            finally:
                await self._leave_save()

    async def _steps(self) -> None:
        config, attempt = self._config, self._attempt
        await self._engines.update(self._step)
        if self._step == 0 and config.eval.at_start:
            await attempt.evaluations.before_training()
        while self._step < config.run.steps:
            await self._one_step()
        await self._settle_save()
        if config.checkpoint.export_hf:
            await self._engines.to_trainer()
            await self._trainer.export_hf(Path(config.run.out) / "hf")
        attempt.records.finish()

    async def _one_step(self) -> None:
        config, attempt, clock = self._config, self._attempt, Clock()
        await self._settle_save(wait=False)
        batch = await self._next_batch()
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
            evaluation = await attempt.evaluations.of_step(self._step)
        evaluation |= {"checkpoint/failed": float(self._failed_saves)}
        more = self._engines.memory() | await self._engines.statistics() | evaluation
        attempt.finish_step(self._step, batch, reports, seconds, more, difference)
        if checkpoint_due(config, self._step) or self._guard.stuck:
            await self._save()
        if self._guard.stuck:
            await self._settle_save()
        self._guard.stop_if_stuck()

    async def _next_batch(self) -> StepBatch:
        await self._attempt.evaluations.catch_up()
        try:
            return await self._attempt.next_batch(self._step)
        except (Outage, EnvironmentFailed):
            if self._step > 0:
                await self._save()
                await self._settle_save()
            raise

    async def _save(self) -> None:
        """Save a checkpoint; with ``checkpoint.asynchronous`` it is written while training goes on."""
        await self._settle_save()
        clock = Clock()
        state = {"step": self._step, "guard": self._guard.state(), **self._attempt.state()}
        copy = self._trainer.copy_state if self._config.checkpoint.asynchronous else self._write_at_once
        with clock.phase("save_checkpoints"):
            async with self._engines.borrowed(self._step):
                try:
                    finishing = await self._checkpoints.begin(self._step, copy, state)
                except (UserError, OSError) as error:
                    finishing = None
                    self._failed(self._step, error)
                if finishing is not None:
                    self._saving = self._step, asyncio.create_task(self._finish_save(finishing))
        if self._saving is None:
            return
        metrics = {f"timing/{k}": v for k, v in clock.seconds.items()}
        self._attempt.records.add(self._step, metrics | (self._uploader.metrics() if self._uploader else {}))

    async def _write_at_once(self, path: Path) -> Awaitable[Files]:
        done: asyncio.Future[Files] = asyncio.get_running_loop().create_future()
        done.set_result(await self._trainer.save_state(path))
        return done

    async def _finish_save(self, finishing: Coroutine[Any, Any, Checkpoint]) -> None:
        checkpoint = await finishing
        if self._uploader is not None:
            self._uploader.add(checkpoint)

    async def _settle_save(self, wait: bool = True) -> None:
        """Wait for the checkpoint that is being written, if any; else look whether it failed."""
        if self._saving is None or not (wait or self._saving[1].done()):
            return
        (step, saving), self._saving = self._saving, None
        try:
            await saving
        except Replaced:
            raise
        except (UserError, OSError) as error:
            self._failed(step, error)

    def _failed(self, step: int, error: Exception) -> None:
        """Raise, or record that a step has no checkpoint, as ``checkpoint.on_failure`` says."""
        if self._config.checkpoint.on_failure == "stop":
            raise error
        log.error("step %d has no checkpoint: %s", step, error)
        self._failed_saves += 1

    async def _leave_save(self) -> None:
        """Wait for the checkpoint that is being written, because this attempt ends; a lost trainer ends it."""
        if self._saving is not None:
            (step, saving), self._saving = self._saving, None
            await until_done(saving)
            if not saving.cancelled() and (error := saving.exception()) is not None:
                log.warning("step %d has no checkpoint: %s", step, error)


async def until_lost(trainer: Trainer, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; cancel it, wait until it has ended, and raise TrainerLost when the trainer is lost."""
    working, losing = asyncio.create_task(work), asyncio.create_task(_as_task(trainer.lost()))
    try:
        await asyncio.wait((working, losing), return_when=asyncio.FIRST_COMPLETED)
        finished = working.done()
    finally:
        for task in (working, losing):
            task.cancel()
        await until_done(working, losing)
    if finished:
        return working.result()
    raise losing.result()


async def _as_task(awaitable: Awaitable[T]) -> T:
    return await awaitable


def checkpoint_due(config: Config, step: int) -> bool:
    """Return whether to save after ``step`` steps; always true after the last one."""
    return step == config.run.steps or (config.checkpoint.interval > 0 and step % config.checkpoint.interval == 0)


@dataclass
class Clock:
    """Durations of the phases of one step, in seconds."""

    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the duration of the block."""
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def read(self) -> dict[str, float]:
        """Return the seconds of the phases so far, and as ``step`` those since the clock's start."""
        return {**self.seconds, "step": time.monotonic() - self.began}
