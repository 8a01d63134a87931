"""What a run leaves to look at: metrics, trajectories, TensorBoard, terminal, curve and summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.config.schema import Config
from megatron_fleet.telemetry.console import Progress
from megatron_fleet.telemetry.curve import draw_learning_curve
from megatron_fleet.telemetry.sinks import MetricSink, MetricsLog, TensorBoardSink, TrajectoryLog
from megatron_fleet.telemetry.summary import write_summary


class Records:
    """All sinks of one run, below ``run.out``."""

    def __init__(self, config: Config, resumed_step: int | None, started: float):
        """``resumed_step``: what is newer is dropped; ``None`` starts anew. ``started``: unix time of this attempt."""
        self._out = Path(config.run.out)
        self._plot, self._name = config.logging.plot, config.run.name
        self._sinks: list[MetricSink] = [MetricsLog(self._out / "metrics.jsonl", resumed_step, started)]
        if config.logging.tensorboard:
            self._sinks.append(TensorBoardSink(self._out / "tensorboard", resumed_step))
        self._trajectories = TrajectoryLog(self._out / "trajectories", resumed_step)
        self._progress = Progress(config.run.name, config.run.steps, resumed_step or 0)

    @contextmanager
    def phase(self, name: str, total: int = 0) -> Iterator[Callable[[int], None]]:
        """Show a phase; the function given tells how many of ``total`` are done."""
        self._progress.phase(name, total)
        done = 0

        def advance(now: int) -> None:
            nonlocal done
            self._progress.advance(now - done)
            done = now

        yield advance

    def show(self, phase: str) -> None:
        self._progress.phase(phase)

    def trajectories(self, step: int, groups: Sequence[Group], kind: Literal["step", "eval", "greedy"]) -> None:
        self._trajectories.write(step, groups, kind)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One training step is over."""
        self._write(step, metrics)
        self._progress.step_done(metrics)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation that belongs to no training step is over."""
        self._write(step, metrics)
        self._progress.evaluated(metrics)

    def finish(self) -> None:
        """Write ``summary.json`` and ``curve.png``."""
        metrics = self._out / "metrics.jsonl"
        summary = write_summary(metrics, self._out / "summary.json")
        if self._plot:
            draw_learning_curve(metrics, self._out / "curve.png", self._name)
        self.close()
        print(_last_line(self._out, summary), flush=True)

    def close(self) -> None:
        """Flush and close everything. Idempotent."""
        self._progress.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)


def _last_line(out: Path, summary: Mapping[str, object]) -> str:
    before, after = summary.get("pass_at_1_before"), summary.get("pass_at_1_after")
    if isinstance(before, float) and isinstance(after, float):
        return f"mfleet: finished {summary['steps']} steps, held-out pass@1 {before:.3f} → {after:.3f}; see {out}."
    return f"mfleet: finished {summary['steps']} steps; see {out}."
