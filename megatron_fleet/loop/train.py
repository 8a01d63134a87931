"""Training loop of the controller: play, update, sync weights, record; evaluate and save when due.

Stages of a step, in their order:

=========  =====================================  ========================================  =======================
stage      takes                                  waits for                                 gives
=========  =====================================  ========================================  =======================
play       tasks, the weights that engines hold   the step's groups, each requested,        a `StepBatch`
                                                  judged and played again on its own;
                                                  groups of later steps play on
update     the `StepBatch`                        colocated: the engines, to sleep;         weights of the next version
                                                  an evaluation beside it, at its end;
                                                  evaluation engines, for their weights
save       weights, optimizer, guard              the copy to host memory, when one is due  a copy, being written
sync       the weights                            all engines, which stop sampling          engines with this version
record     metrics of all of these                nothing                                   a row, and the checkpoint
evaluate   the weights that engines hold          its episodes, unless it is left to run    scores
                                                  beside the next rollout or update, or
                                                  by engines of its own beside some steps
=========  =====================================  ========================================  =======================
"""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar, final

from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.checkpoint.saves import Saves
from megatron_fleet.config.schema import Config
from megatron_fleet.debug.dumps import Dumps
from megatron_fleet.loop.attempt import Attempt, OpenAttempt
from megatron_fleet.loop.batches import Outage
from megatron_fleet.loop.engine_weights import EngineWeights
from megatron_fleet.loop.guard import StepGuard
from megatron_fleet.loop.stopping import Stopped, StopRequest
from megatron_fleet.loop.update import update
from megatron_fleet.platform.timeline import TIMELINE, Clock
from megatron_fleet.platform.waiting import unless
from megatron_fleet.rollout.requests import EnvironmentFailed
from megatron_fleet.trainer.base import BudgetSpent, Trainer, TrainerLost

T = TypeVar("T")
Probe = dict[str, list[list[float]]]
"""See `EngineWeights.probe`."""


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
        self._step = 0  # of the trainer's weights
        self._recorded_step: int | None = None

    async def run(self, found: Checkpoint | None) -> None:
        """Train to the end. A trainer that dies is restarted and resumes from the last checkpoint.

        Args:
            found: checkpoint to start from, see `checkpoint.resume_point.find_start`.

        Raises:
            UserError: a problem that the user can fix; the run can be resumed.
            Stopped: the run was asked to end.
        """
        self._saves.saved_step = None if found is None else found.step
        start: Coroutine[Any, Any, None] = self._engines.start()
        try:
            while True:
                try:
                    await start
                    return await until_lost(self._trainer, self._from_checkpoint(found))
                except TrainerLost as reason:
                    found = await self._saves.newest(found)
                    start = self._engines.restart(reason)
        finally:
            self._stop.saved_step = self._saves.saved_step

    async def _from_checkpoint(self, found: Checkpoint | None) -> None:
        state = None if found is None else found.trainer_state()
        if self._config.algorithm.kl.coef > 0:
            await self._trainer.keep_reference()
        await self._saves.resume(found)
        policy, out = self._config.policy, Path(self._config.run.out)
        dumps = Dumps(out / "dumps", policy.safety.max_dumps, self._config)
        self._guard = StepGuard(policy, self._trainer, dumps)
        if state is not None:
            self._guard.load(state["guard"])
        self._step = 0 if state is None else int(state["step"])
        self._saves.saved_step = self._recorded_step = None if state is None else self._step
        async with self._open(state, None if found is None else found.path) as self._attempt:
            try:
                await self._steps()
            except (Stopped, Outage, EnvironmentFailed, BudgetSpent):
                await self._save_now()
                raise
            finally:
                await self._saves.leave()

    async def _steps(self) -> None:
        config, attempt = self._config, self._attempt
        self._stop.heeded = True
        self._check_budget()
        await self._engines.update(self._step)
        await self._stop.interrupt(attempt.evaluations.catch_up())
        while self._step < config.run.last_step:
            await self._one_step()
        await self._saves.finish()
        await self._saves.choose_kept()
        if config.checkpoint.export.last:
            await self._engines.to_trainer()
            await self._trainer.export_hf(Path(config.run.out) / "hf")
        await self._engines.statistics()  # which counts the tokens of the evaluation after the last step
        spending = self._trainer.spending
        attempt.records.finish(None if spending is None else spending.usd)
        TIMELINE.finish(self._step)

    async def _one_step(self) -> None:
        config, attempt, clock, probe = self._config, self._attempt, Clock(), None
        TIMELINE.begin_step(self._step)
        self._saves.check()
        batch = await self._stop.interrupt(attempt.next_batch(self._step))
        async with attempt.evaluations.beside_update(self._stop.interrupt):
            attempt.records.show("training")
            await self._engines.to_trainer()
            with clock.phase("policy_train"):
                reports = await update(
                    config.algorithm,
                    config.policy,
                    config.run,
                    self._trainer,
                    self._guard,
                    batch.updates,
                    self._step,
                )
            self._step += 1
        if self._saves.due(self._step) or self._guard.stuck:
            with clock.phase("save_checkpoints"):
                probe = await self._copy_state()
        with clock.phase("sync_weights"):
            difference = await self._engines.update(self._step)
        seconds = clock.read() | self._engines.read_seconds()
        attempt.batches.trained()
        attempt.records.trajectories(self._step, batch.groups)
        more = self._engines.memory() | await self._engines.statistics() | self._saves.metrics()
        attempt.finish_step(self._step, batch, reports, seconds, more, difference)
        self._recorded_step = self._step
        self._commit(probe)
        self._guard.stop_if_stuck()
        self._check_budget()
        await self._stop.interrupt(attempt.evaluations.catch_up())

    def _check_budget(self) -> None:
        if self._trainer.spending is not None:
            self._trainer.spending.check()

    async def _copy_state(self) -> Probe | None:
        """Copy the trainer's state for a checkpoint of this step, while it has the devices and before its weights go
        out; `_commit` follows once the step is recorded. Returns what the check of exports compares with.
        """
        if await self._saves.copy(self._step) and self._config.checkpoint.export.check:
            return await self._engines.probe()
        return None

    def _commit(self, probe: Probe | None) -> None:
        state = {"step": self._step, "guard": self._guard.state(), **self._attempt.state()}
        self._saves.commit(state if probe is None else state | {"probe": probe}, self._attempt.files())

    async def _save_now(self) -> None:
        """Save the newest step, because the attempt ends. One that is not recorded, and its update, is done again."""
        await self._saves.finish()
        if self._step == self._recorded_step != self._saves.saved_step:
            await self._engines.to_trainer()
            self._commit(await self._copy_state())
            await self._saves.finish()
        await self._engines.statistics()


async def until_lost(trainer: Trainer, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; cancel it, wait until it has ended, and raise TrainerLost when the trainer is lost."""
    return await unless(work, trainer.lost())
