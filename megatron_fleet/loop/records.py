"""Outputs of a run: metrics, trajectories, TensorBoard, terminal progress, learning curve and summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.config.errors import say
from megatron_fleet.config.schema import Config
from megatron_fleet.config.secrets import wandb_key
from megatron_fleet.config.units import count
from megatron_fleet.evaluation.episode_records import EpisodeRecords
from megatron_fleet.evaluation.evaluator import Evaluation
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.platform.timeline import TIMELINE, Awaited
from megatron_fleet.telemetry.charts import write_learning_curve
from megatron_fleet.telemetry.console import RunProgress
from megatron_fleet.telemetry.sinks import (
    HistogramSink,
    MetricSink,
    MetricsLog,
    OwnSink,
    SampleSink,
    TensorBoardSink,
    read_metrics,
)
from megatron_fleet.telemetry.summary import write_summary
from megatron_fleet.telemetry.trackers import MlflowSink, WandbSink


class Advance(Protocol):
    """Reports how many units of a phase's work are done, and what it waits for."""

    def __call__(self, now: int, awaited: Sequence[Awaited] = ()) -> None: ...


class Records:
    """All sinks of one run, below ``run.out``."""

    def __init__(
        self, config: Config, resumed_step: int | None, started: float, sinks: Sequence[MetricSink] = ()
    ) -> None:
        """
        Args:
            resumed_step: newer records are dropped; ``None``: start from scratch.
            started: Unix time of this attempt.
            sinks: further receivers of the metrics.
        """
        self._out, self._id = Path(config.run.out), config.run.id
        self._plot, self._name, self._pass_threshold = config.logging.plot, config.run.name, config.eval.pass_threshold
        self._sinks: list[MetricSink] = [MetricsLog(self._out / "metrics.jsonl", resumed_step, started)]
        if config.logging.tensorboard:
            self._sinks.append(TensorBoardSink(self._out / "tensorboard", resumed_step))
        if config.logging.wandb.project is not None:
            self._sinks.append(_wandb(config, resumed_step, started))
        if config.logging.mlflow.uri is not None:
            self._sinks.append(_mlflow(config, resumed_step, started))
        self._sinks += [OwnSink(path, config, resumed_step, started) for path in config.logging.own]
        self._sinks += sinks
        self._episodes = EpisodeRecords(config, _id(config), Tokenizer(config.model.folder).decode, resumed_step)
        self._progress = RunProgress(config.run.name, config.run.last_step, resumed_step or 0)

    @contextmanager
    def phase(self, name: str, total: int = 0) -> Iterator[Advance]:
        """Show a phase."""
        self._progress.phase(name, total)
        with TIMELINE.phase(name, total) as phase:

            def advance(now: int, awaited: Sequence[Awaited] = ()) -> None:
                self._progress.advance(now - phase.done)
                phase.done, phase.awaited = now, awaited

            yield advance

    def show(self, phase: str) -> None:
        self._progress.phase(phase)

    def trajectories(self, step: int, groups: Sequence[Group]) -> None:
        """Record the episodes of a training step."""
        self._episodes.training(step, groups)
        self._sample("train", step, groups)

    def episodes_of(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        """Record the episodes of an evaluation; returns its metrics."""
        metrics = evaluation.metrics(self._pass_threshold) | self._episodes.metrics(evaluation=True)
        self._episodes.evaluation(step, evaluation, metrics, f"global_step_{step}")
        self._sample("eval", step, evaluation.sampled or evaluation.greedy)
        return metrics

    def step(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, np.ndarray]) -> None:
        """Record a finished training step. ``distributions``: float64 ``[N]`` each, drawn as histograms."""
        self._write(step, {**metrics, **self._episodes.metrics(evaluation=False)})
        for sink in self._sinks:
            if isinstance(sink, HistogramSink):
                sink.draw(step, distributions)
        self._progress.step_done(metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float], in_step: bool = False) -> None:
        """Record a finished evaluation. ``in_step``: it ended within a later step."""
        self._write(step, metrics)
        self._progress.evaluated(step, metrics, in_step)

    def evaluated(self, step: int) -> bool:
        """Return whether an evaluation of the weights of ``step`` is on record."""
        rows = read_metrics(self._out / "metrics.jsonl")
        return any(row["step"] == step and "eval/all/episodes" in row for row in rows)

    def finish(self, cost_usd: float | None = None) -> None:
        """Write ``summary.json`` and, of a run with steps, ``curve.svg``. ``cost_usd``: what a service has billed."""
        metrics = self._out / "metrics.jsonl"
        summary = write_summary(metrics, self._out / "summary.json", cost_usd)
        if self._plot and read_metrics(metrics):
            write_learning_curve(metrics, self._out / "curve.svg", self._name)
        self.close(complete=True)
        say(_last_line(self._out, summary))

    def close(self, complete: bool = False) -> None:
        """Flush and close all sinks. Idempotent. ``complete``: the run has finished all its steps."""
        self._progress.close()
        for sink in self._sinks:
            sink.close(complete)
        self._sinks = []
        self._episodes.close()

    def _sample(self, kind: str, step: int, groups: Sequence[Group]) -> None:
        for sink in self._sinks:
            if isinstance(sink, SampleSink):
                sink.samples(kind, step, groups)

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)


def _wandb(config: Config, resumed_step: int | None, started: float) -> WandbSink:
    where, out, tree = config.logging.wandb, Path(config.run.out), config.model_dump(mode="json")
    attempt = resumed_step, started, wandb_key(config.data.modality)
    return WandbSink(where.project or "", where.entity, where.mode, _id(config), out, tree, *attempt, where.samples)


def _mlflow(config: Config, resumed_step: int | None, started: float) -> MlflowSink:
    where, tree = config.logging.mlflow, config.model_dump(mode="json")
    return MlflowSink(where.uri or "", where.experiment, _id(config), tree, resumed_step, started)


def _id(config: Config) -> str:
    assert config.run.id is not None  # `loop.main` has read it from the folder
    return config.run.id


def _last_line(out: Path, summary: Mapping[str, Any]) -> str:
    before, after = summary.get("pass_at_1_before"), summary.get("pass_at_1_after")
    parts = [f"mfleet: finished {count(summary['steps'], 'step')}"]
    if isinstance(before, float) and isinstance(after, float):
        parts.append(f"held-out pass@1 {before:.3f} → {after:.3f}")
    if (cost := summary["cost_usd"]) is not None:
        parts.append(f"${cost:,.2f} at the service")
    return f"{', '.join(parts)}; see {out}."
