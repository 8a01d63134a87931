"""Results of a search, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_fleet.config.errors import say_lines
from megatron_fleet.tuning.override_file import write_overrides
from megatron_fleet.tuning.search import Candidate


@dataclass(slots=True)
class Report:
    """Results of all candidates, the configuration's own first.

    Attributes:
        title: what was measured.
        device: on which it was.
        choice: candidate to use; ``None``: none ran.
    """

    title: str
    device: str
    rows: list[Candidate]
    choice: Candidate | None = None

    def recommendation(self) -> str:
        """Name the choice and its speed-up."""
        if self.choice is None:
            return "Nothing ran."
        own, overrides = self.rows[0], " ".join(self.choice.settings) or "no override"
        if self.choice is own:
            return f"Stay with {own.name}: nothing else is faster beyond the spread of the measurements."
        if own.problem is not None:
            return f"{self.choice.name} is the fastest that ran ({overrides}); {own.name} did not: {own.problem}"
        return f"{self.choice.name} is {own.median / self.choice.median:.2f} times as fast as {own.name} ({overrides})."


def finish(report: Report, as_json: bool, write: Path | None) -> int:
    """Print a report, and write its choice to the file ``write``; returns the exit status.

    Raises:
        UserError: the file cannot be written.
    """
    say_lines(to_json(report) if as_json else to_text(report))
    if write is not None and report.choice is not None:
        write_overrides(write, report.choice.settings)
    return 0


def to_json(report: Report) -> str:
    """Return the report as one JSON object."""
    rows = [asdict(row) | {"median": row.median if row.seconds else None} for row in report.rows]
    choice = None if report.choice is None else list(report.choice.settings)
    content = {"title": report.title, "device": report.device, "rows": rows, "choice": choice}
    return json.dumps(content | {"recommendation": report.recommendation()}, indent=2)


def to_text(report: Report) -> str:
    """Return the report as a table of the candidates that ran, with the problems of the others."""
    from rich.console import Console
    from rich.table import Table

    ran = [row for row in report.rows if row.problem is None]
    figures = list(dict.fromkeys(name for row in ran for name in row.figures))
    table = Table(title=f"{report.title}, {report.device}")
    for column in ("", "ms", "range", "speed", "peak GiB", *figures):
        table.add_column(column, justify="right" if column else "left")
    for row in ran:
        table.add_row(*_cells(row, ran[0], figures))
    console = Console(width=150, color_system=None)
    with console.capture() as captured:
        console.print(table)
    lines = [captured.get().rstrip()] if ran else []
    lines += [f"{row.name}: {row.problem}" for row in report.rows if row.problem is not None]
    return "\n".join([*lines, report.recommendation()])


def _cells(row: Candidate, first: Candidate, figures: Sequence[str]) -> Sequence[str]:
    span = f"{1e3 * min(row.seconds):.1f}-{1e3 * max(row.seconds):.1f}"
    speed = f"{first.median / row.median:.2f}"
    more = (f"{row.figures[name]:.4g}" if name in row.figures else "" for name in figures)
    return (row.name, f"{1e3 * row.median:.1f}", span, speed, f"{row.peak_bytes / 2**30:.2f}", *more)
