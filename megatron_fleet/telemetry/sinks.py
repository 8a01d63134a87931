"""Sinks for metrics. On resume each one drops what a failed attempt wrote past its checkpoint."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, runtime_checkable

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import Interface, load
from megatron_fleet.config.files import parse_json, read_file
from megatron_fleet.storage.local import write_atomically

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group
    from megatron_fleet.config.schema import Config

log = logging.getLogger(__name__)

UNFINISHED = "it is left out, as an interrupted process left it unfinished"
HISTOGRAM_BINS = 30
"""Same number as TensorBoard draws."""


class MetricSink(Protocol):
    """Receiver of metrics per step, in their order; those of an evaluation may come some steps later (`eval.engines`).
    A sink that resumes after step k drops newer steps.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, complete: bool = True) -> None:
        """Close the sink. ``complete``: the run finished; otherwise it failed or was stopped."""


@runtime_checkable
class HistogramSink(Protocol):
    """Metric sink that also draws histograms."""

    def draw(self, step: int, distributions: Mapping[str, np.ndarray]) -> None: ...


@runtime_checkable
class SampleSink(Protocol):
    """Metric sink that also shows a few episodes."""

    def samples(self, kind: str, step: int, groups: Sequence[Group]) -> None:
        """Show a few episodes. ``kind``: ``train`` or ``eval``."""


class LoggerFactory(Protocol):
    def __call__(self, config: Config, resumed_step: int | None, started: float, /) -> MetricSink:
        """Return the logger of an attempt.

        Args:
            resumed_step: the logger drops newer steps; ``None`` = a new run.
            started: unix time of this attempt.
        """
        ...


OWN_LOGGER = Interface("logging.own", "logger", LoggerFactory, "controller")


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
        make = load(OWN_LOGGER, path)
        self._path = path
        try:
            self._sink: MetricSink | None = make(config, resumed_step, started)
        except Exception as error:
            raise UserError(f"logging.own={path} raises {type(error).__name__}: {error}; correct it.") from error

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
                "logging.own=%s: %s raises %s: %s. It is not called again; metrics.jsonl has everything.",
                self._path,
                method,
                type(error).__name__,
                error,
                exc_info=error,
            )


class MetricsLog:
    """Writer of ``metrics.jsonl``: one JSON object per step, in their order, flushed immediately.

    Besides the metrics a line has ``step``, ``time`` (unix seconds) and ``attempt`` (unix seconds when the attempt that
    wrote it began), so durations survive a resume. Non-finite numbers are written as ``null``.
    """

    def __init__(self, path: Path, resumed_step: int | None, started: float | None = None) -> None:
        """``resumed_step``: keep lines up to it; ``None`` = a new run, keep nothing. ``started`` defaults to now.

        Raises:
            UserError: as for `read_metrics`.
        """
        self._path = path
        self._attempt = time.time() if started is None else started
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resumed_step is None else [r for r in read_metrics(path) if r["step"] <= resumed_step]
        self._last: dict[str, Any]
        self._last_at: int  # byte offset of the last line
        self._file: BinaryIO
        self._replace(kept)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line, or extend the line of ``step`` (training, then evaluation).

        Raises:
            ValueError: a metric of this step was written before.
        """
        row: dict[str, Any] = {name: json_number(value) for name, value in metrics.items()}
        if step < self._last["step"]:
            self._write_late(step, row)
            return
        if step == self._last["step"]:
            row = _joined(self._last, row)
            self._file.seek(self._last_at)
        self._last_at = self._file.tell()
        self._last = {"step": step} | row | self._when()
        self._file.write(_line(self._last))
        self._file.truncate()
        self._file.flush()

    def _write_late(self, step: int, row: dict[str, Any]) -> None:
        """Add to a line that others follow, or insert one. The file is replaced, so that no crash loses their rows."""
        rows = {one["step"]: one for one in read_metrics(self._path)}
        rows[step] = _joined(rows[step], row) if step in rows else {"step": step} | row | self._when()
        self._file.close()
        self._replace([rows[step] for step in sorted(rows)])

    def _when(self) -> dict[str, float]:
        return {"time": time.time(), "attempt": self._attempt}

    def _replace(self, rows: Sequence[dict[str, Any]]) -> None:
        lines = [_line(row) for row in rows]
        write_atomically(self._path, b"".join(lines))
        self._last = rows[-1] if rows else {"step": -1}
        self._last_at = sum(len(line) for line in lines[:-1])
        self._file = self._path.open("r+b")
        self._file.seek(0, os.SEEK_END)

    def close(self, complete: bool = True) -> None:
        self._file.close()


def _joined(before: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Join the metrics of a step. Raises ValueError when one is in both."""
    if twice := row.keys() & before.keys():
        raise ValueError(f"metrics of step {before['step']} were written before: {', '.join(sorted(twice))}")
    return {**before, **row}


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def json_number(value: float | None) -> float | None:
    """Return ``value`` for JSON, which has no NaN; ``None`` if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
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
        raise UserError(f"{where} has no step, a whole number from 0; {remedy}.")
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
