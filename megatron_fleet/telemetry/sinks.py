"""Sinks for metrics and trajectories. On resume each one drops what a failed attempt wrote past its checkpoint."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import load
from megatron_fleet.config.files import parse_json, read_file
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.telemetry.image_files import FOLDER, save_images

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group, Trajectory
    from megatron_fleet.config.schema import Config

log = logging.getLogger(__name__)

UNFINISHED = "it is left out, as an interrupted process left it unfinished"
HISTOGRAM_BINS = 30
"""Same number as TensorBoard draws."""


class MetricSink(Protocol):
    """Receiver of metrics per step; steps only increase. A sink that resumes after step k drops newer steps."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, complete: bool = True) -> None:
        """Close the sink. ``complete``: the run finished; otherwise it failed or was stopped."""


@runtime_checkable
class HistogramSink(Protocol):
    """Metric sink that also draws histograms."""

    def draw(self, step: int, distributions: Mapping[str, np.ndarray]) -> None: ...


LOGGER_ARGUMENTS = ("config", "resumed_step", "started")
"""Arguments of the factory of a user's logger, see `OwnSink`; it returns a `MetricSink`."""


class OwnSink:
    """User-supplied logger. After its first failure it logs a warning and is disabled, so that the run continues."""

    def __init__(self, path: str, config: Config, resumed_step: int | None, started: float) -> None:
        """Create the user's logger.

        Args:
            path: ``package.module:name`` of the factory, which is called with the other three.
            resumed_step: the logger drops newer steps; ``None`` = a new run.
            started: unix time of this attempt.

        Raises:
            UserError: it cannot be imported or created.
        """
        make = load("logging.own", path, LOGGER_ARGUMENTS)
        self._path = path
        try:
            self._sink: MetricSink | None = make(config, resumed_step, started)
        except Exception as error:
            raise UserError(f"logging.own={path}: raises {type(error).__name__}: {error}; correct it.") from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try("write", step, metrics)

    def close(self, complete: bool = True) -> None:
        self._try("close", complete)

    def _try(self, method: str, *arguments: Any) -> None:
        if self._sink is None:
            return
        try:
            getattr(self._sink, method)(*arguments)
        except Exception as error:
            self._sink = None
            log.warning(
                "logging.own=%s: %s raises %s: %s. It gets nothing more; metrics.jsonl has everything.",
                self._path,
                method,
                type(error).__name__,
                error,
                exc_info=error,
            )


class MetricsLog:
    """Writer of ``metrics.jsonl``: one JSON object per step, flushed immediately.

    Besides the metrics a line has ``step``, ``time`` (unix seconds) and ``attempt`` (unix seconds when the attempt that
    wrote it began), so durations survive a resume. Non-finite numbers are written as ``null``.
    """

    def __init__(self, path: Path, resumed_step: int | None, started: float | None = None) -> None:
        """``resumed_step``: keep lines up to it; ``None`` = a new run, keep nothing. ``started`` defaults to now.

        Raises:
            UserError: as for `read_metrics`.
        """
        self._attempt = time.time() if started is None else started
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resumed_step is None else [r for r in read_metrics(path) if r["step"] <= resumed_step]
        lines = [_line(row) for row in kept]
        write_atomically(path, b"".join(lines))
        self._last: dict[str, Any] = kept[-1] if kept else {"step": -1}
        self._last_at = sum(len(line) for line in lines[:-1])  # byte offset of the last line
        self._file = path.open("r+b")
        self._file.seek(0, os.SEEK_END)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line, or extend the last one if ``step`` is its step (training, then evaluation).

        Raises:
            ValueError: ``step`` is older than the last line, or a metric of this step was written before.
        """
        row = {name: _json_number(value) for name, value in metrics.items()}
        if step < self._last["step"] or (step == self._last["step"] and row.keys() & self._last.keys()):
            raise ValueError(f"metrics of step {step} were written before; the log is at step {self._last['step']}")
        if step == self._last["step"]:
            row = self._last | row
            self._file.seek(self._last_at)
        self._last_at = self._file.tell()
        self._last = {"step": step} | row | {"time": time.time(), "attempt": self._attempt}
        self._file.write(_line(self._last))
        self._file.truncate()
        self._file.flush()

    def close(self, complete: bool = True) -> None:
        self._file.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _json_number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None  # JSON has no NaN
    return value if isinstance(value, int) else float(value)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics log, without a last line left unfinished by a crash; a missing file has none.

    Raises:
        UserError: the file cannot be read, or another line is damaged.
    """
    if not path.exists():
        return []
    lines = read_file(path, "remove it; its metrics are lost").split(b"\n")[:-1]  # the rest is an unfinished line
    rows = []
    for number, line in enumerate(lines, 1):
        # The last line is overwritten in place, and a process may be killed in the middle of that.
        last = number == len(lines)
        remedy = UNFINISHED if last else "remove the line; the metrics of its step are lost"
        try:
            rows.append(_row(line, f"{path}, line {number}", remedy))
        except UserError as error:
            if not last:
                raise
            log.warning("%s", error)
    return rows


def _row(line: bytes, where: str, remedy: str) -> dict[str, Any]:
    """Parse a line of a metrics log. Raises UserError if it is damaged."""
    row = parse_json(line, where, remedy)
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 1 << 31:
        raise UserError(f"{where}: has no step, a whole number from 0; {remedy}.")
    for name, value in row.items():
        # The comparison is false for NaN.
        if value is not None and not (isinstance(value, int | float) and abs(value) <= sys.float_info.max):
            raise UserError(f"{where}: {name[:100]} is neither a finite number nor null; {remedy}.")
    return row


class TensorBoardSink:
    """Sink for scalars and histograms as TensorBoard events, without torch.

    TensorBoard itself drops the steps that a resume replaces.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if resumed_step is None:
            for path in folder.glob("events.out.tfevents.*"):
                path.unlink()
        self._writer = EventFileWriter(str(folder))
        first = 0 if resumed_step is None else resumed_step + 1
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(step, [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])

    def draw(self, step: int, distributions: Mapping[str, np.ndarray]) -> None:
        """Write a histogram of each array, float64 ``[N]``, N ≥ 1."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(step, [Summary.Value(tag=name, histo=_histogram(own)) for name, own in distributions.items()])

    def close(self, complete: bool = True) -> None:
        self._writer.close()

    def _add(self, step: int, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()


def _histogram(values: np.ndarray) -> Any:
    """Convert to TensorBoard's format: counts, each with the upper edge of its bin."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    counts, edges = np.histogram(values, HISTOGRAM_BINS)
    return HistogramProto(
        min=values.min(),
        max=values.max(),
        num=len(values),
        sum=values.sum(),
        sum_squares=(values**2).sum(),
        bucket_limit=edges[1:],
        bucket=counts,
    )


class TrajectoryLog:
    """Log of messages and sampled tokens, per step.

    ``step_000001.jsonl`` (``eval_000001.jsonl``, ``greedy_000001.jsonl``): one readable line per trajectory.
    The ``.npz`` next to it: ``token_ids`` int32, ``action_mask`` bool and ``behaviour_logprobs`` float32, concatenated
    over the trajectories of all lines, and ``offsets`` int64 ``[lines + 1]``: line i has
    ``[offsets[i], offsets[i+1])``. Images are separate files in ``images`` next to the folder; lines name them by the
    SHA-256 of their content.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        """``resumed_step``: keep files up to it; ``None`` = a new run, keep nothing."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            step = re.fullmatch(r"(?:step|eval|greedy)_([0-9]{6})\..*", path.name)
            if step and (resumed_step is None or int(step[1]) > resumed_step):
                path.unlink()

    def write(self, step: int, groups: Sequence[Group], kind: Literal["step", "eval", "greedy"] = "step") -> list[Path]:
        """Write both files and the images, each atomically; return their paths."""
        return save_trajectories(self._folder / f"{kind}_{step:06d}", [t for g in groups for t in g.trajectories])


def save_trajectories(stem: Path, trajectories: Sequence[Trajectory]) -> list[Path]:
    """Write images, ``stem.npz`` and then ``stem.jsonl``, each atomically; return their paths.

    An image goes to the folder ``images`` next to that of ``stem``, unless it exists there.
    """
    images = save_images(stem.parent.parent / FOLDER, trajectories)
    part = stem.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **_arrays(trajectories))
    part.replace(stem.with_suffix(".npz"))
    lines = [json.dumps(_record(t), ensure_ascii=False, default=str) + "\n" for t in trajectories]
    write_atomically(stem.with_suffix(".jsonl"), "".join(lines).encode("utf-8", "replace"))
    return [stem.with_suffix(".jsonl"), stem.with_suffix(".npz"), *images]


def load_trajectories(path: Path) -> list[Trajectory]:
    """Load trajectories from ``path`` (the ``.jsonl``) and the ``.npz`` next to it.

    Expert routing is not saved, and images are not loaded from their files.
    """
    from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
    from megatron_fleet.models.images import ImageSpan

    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    found = []
    for row, a, b in zip(map(json.loads, lines), arrays["offsets"][:-1], arrays["offsets"][1:], strict=True):
        own = {name: arrays[name][a:b] for name in ("token_ids", "action_mask", "behaviour_logprobs")}
        names = {"task_key": row["task"], "env_key": row["env"], "reward_reason": row["reason"]}
        same = {n: row[n] for n in ("group", "sample", "reward", "final_answer", "metrics", "messages")}
        spans, starts = tuple(Span(*span) for span in row["spans"]), tuple(row["segment_starts"])
        images = tuple(ImageSpan(a, b, name) for a, b, _, name in row.get("image_spans", ()))
        parts: dict[str, Any] = {"spans": spans, "segment_starts": starts, "image_spans": images}
        found.append(Trajectory(**own, **names, **same, **parts, outcome=Outcome(row["outcome"])))
    return found


def _record(t: Trajectory) -> dict[str, Any]:
    return {
        "task": t.task_key,
        "env": t.env_key,
        "group": t.group,
        "sample": t.sample,
        "outcome": t.outcome,
        "reward": _json_number(t.reward),
        "reason": t.reward_reason,
        "final_answer": t.final_answer,
        "tokens": len(t.token_ids),
        "action_tokens": int(t.action_mask.sum()),
        "metrics": t.metrics,
        "segment_starts": t.segment_starts,
        "spans": [[s.kind, s.start, s.end, s.turn, s.weight_version] for s in t.spans],
        "image_spans": [[s.start, s.end, _turn(t, s.start), s.digest] for s in t.image_spans],
        "messages": t.messages,
    }


def _turn(t: Trajectory, place: int) -> int:
    return next(span.turn for span in t.spans if span.start <= place < span.end)


def _arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    def joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype)

    return {
        "token_ids": joined([t.token_ids for t in trajectories], np.int32),
        "action_mask": joined([t.action_mask for t in trajectories], np.bool_),
        "behaviour_logprobs": joined([t.behaviour_logprobs for t in trajectories], np.float32),
        "offsets": np.cumsum([0, *(len(t.token_ids) for t in trajectories)], dtype=np.int64),
    }
