"""State of one attempt at a run, from its start or a checkpoint until it ends or the trainer is lost."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, final

from megatron_fleet.config.schema import Config
from megatron_fleet.data.mixture import drawable
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.apart import EvaluationEngines
from megatron_fleet.evaluation.evaluator import Evaluator
from megatron_fleet.evaluation.in_training import Evaluations
from megatron_fleet.loop.batches import Batches, Episodes, StepBatch
from megatron_fleet.loop.records import Records
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.telemetry.alert_rules import AlertRules
from megatron_fleet.telemetry.metrics import (
    async_metrics,
    attempt_metrics,
    data_metrics,
    distributions,
    progress_metrics,
    step_metrics,
)
from megatron_fleet.telemetry.shards import encode
from megatron_fleet.telemetry.sinks import MetricSink
from megatron_fleet.telemetry.trajectories import PromptLog, load_trajectories
from megatron_fleet.trainer.base import LossReport, OptimReport

log = logging.getLogger(__name__)

State = Mapping[str, Any]
GROUPS = "groups.parquet"
"""File of a checkpoint with the episodes that were played and not trained on yet."""


class Rollout(Episodes, Protocol):
    """The part of `rollout.service.RolloutService` that is used here."""

    async def wait_ready(self) -> None: ...


class OpenAttempt(Protocol):
    """Opens an `Attempt` from the state of a checkpoint and its folder, or from scratch with ``None``."""

    def __call__(self, state: State | None, folder: Path | None = None) -> AbstractAsyncContextManager[Attempt]: ...


@final
@dataclass
class Attempt:
    """Batches, evaluations and records of one attempt."""

    config: Config
    batches: Batches
    evaluations: Evaluations
    records: Records
    prompts: PromptLog
    training_tasks: int

    async def next_batch(self, step: int) -> StepBatch:
        """Return `Batches.next`, showing its progress and writing the first prompts to the prompt log."""
        rollout = self.config.rollout
        with self.records.phase("rollout", rollout.prompts_per_step * rollout.samples_per_prompt) as advance:
            batch = await self.batches.next(step, advance, self.evaluations.beside_rollout)
        self.prompts.write(batch.groups)
        return batch

    def finish_step(
        self,
        step: int,
        batch: StepBatch,
        reports: Sequence[tuple[LossReport, OptimReport]],
        seconds: Mapping[str, float],
        more: Mapping[str, float],
        difference: float | None,
    ) -> None:
        """Record training step ``step`` (from 1), and decide whether its weights are evaluated.

        Args:
            more: further metrics.
            difference: between engines and trainer, see `loop.engine_weights.compare`; ``None`` = not compared.
        """
        self.evaluations.decide(step)
        losses, optims = [r[0] for r in reports], [r[1] for r in reports]
        seconds = {**batch.seconds, **seconds}
        threshold = self.config.eval.pass_threshold
        metrics = step_metrics(batch.groups, batch.batch, losses, optims, seconds, step, threshold, difference)
        metrics |= attempt_metrics(asdict(batch.accounting), "accounting")
        metrics |= progress_metrics(step, self.config.rollout.prompts_per_step, self.training_tasks)
        metrics |= data_metrics(self.batches.status(batch.groups)) | dict(more)
        metrics |= async_metrics(batch.staleness, batch.accounting.stale, batch.waits | batch.stream)
        self.records.step(step, metrics, distributions(batch.groups, batch.batch, batch.staleness))

    def state(self) -> dict[str, Any]:
        """State for a checkpoint; JSON-able."""
        return {"batches": self.batches.state(), "unevaluated": self.evaluations.unfinished}

    def files(self) -> dict[str, bytes]:
        """Files for a checkpoint, by name: the groups that came back and wait for their batch."""
        finished = self.batches.finished()
        return {GROUPS: encode(finished)} if finished else {}


def open_attempts(
    config: Config,
    train: Sequence[Task],
    held_out: Sequence[Task],
    rollout: Rollout,
    started: Callable[[], float],
    sinks: Sequence[MetricSink] = (),
    evaluation_engines: EvaluationEngines | None = None,
) -> OpenAttempt:
    """Return the function that opens the attempts of a run.

    Args:
        started: returns the Unix time at which the current attempt began.
        sinks: receive the metrics of all attempts; closing them once per attempt is without effect.
        evaluation_engines: those of ``eval.engines``, if there are any.
    """
    lasting = (AlertRules(config), *sinks)

    @asynccontextmanager
    async def opened(state: State | None, folder: Path | None = None) -> AsyncIterator[Attempt]:
        batches = Batches(config, train, rollout)
        if state is not None:
            groups = None if folder is None else folder / GROUPS
            finished = load_trajectories(groups) if groups is not None and groups.exists() else ()
            batches.load(state["batches"], int(state["step"]), finished)
        step = None if state is None else int(state["step"])
        records = Records(config, step, started(), lasting)
        evaluator = Evaluator(config.eval, config.rollout, config.run, held_out, rollout.collect)
        colocated = bool(config.rollout.engine.colocated)
        evaluations = Evaluations(
            config.eval, config.run.last_step, evaluator, records, colocated, evaluation_engines, step or 0
        )
        if state is None:
            evaluations.decide(0)
        elif (due := state["unevaluated"]) is not None and not records.evaluated(due):
            evaluations.due = step
            if due != step:  # evaluation engines had weights that are gone
                log.warning("the evaluation of step %d had not ended; the weights of step %s are evaluated", due, step)
        prompts = PromptLog(Path(config.run.out) / "prompts", Tokenizer(config.model.folder).decode)
        try:
            with records.phase("starting"):
                await rollout.wait_ready()
            yield Attempt(config, batches, evaluations, records, prompts, drawable(train, config.data.mixture))
        finally:
            await batches.close()
            await evaluations.close()
            records.close()

    return opened
