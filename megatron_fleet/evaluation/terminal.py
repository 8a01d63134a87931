"""Terminal output of `mfleet eval`: a progress bar, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from megatron_fleet.config.errors import say

COLUMNS = (
    ("environment", ""),
    ("tasks", "tasks"),
    ("scored", "tasks_scored"),
    ("episodes", "episodes"),
    ("greedy", "greedy_pass_at_1"),
    ("pass@1", "pass_at_1"),
    ("pass@k", "pass_at_k"),
    ("reward", "avg_raw_reward"),
    ("turns", "avg_turns"),
    ("tool errors", "tool_error_rate"),
    ("unknown", "unknown_reward_rate"),
)
"""Heading and metric of each column; k of ``pass@k`` is the number of samples."""
COUNTS = {"tasks", "tasks_scored", "episodes"}
PRINT_EVERY = 0.1
"""Share of the episodes after which a progress line is printed if stdout is not a terminal."""


@contextmanager
def show(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress of ``total`` episodes on stdout; the yielded callable takes the number done."""
    if not sys.stdout.isatty():
        yield _lines(name, total)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done)
        bar.update(task, completed=total)


def _lines(name: str, total: int) -> Callable[[int], None]:
    printed = 0

    def report(done: int) -> None:
        nonlocal printed
        if done - printed >= max(PRINT_EVERY * total, 1):
            printed = done
            say(f"{name}: {done}/{total} episodes")

    return report


def table(metrics: Mapping[str, float], samples: int) -> str:
    """Format the metrics of one evaluation, with one line per environment and one for all of them.

    Args:
        samples: samples per task at the training temperature.
    """
    environments = sorted({name.split("/")[1] for name in metrics if name.startswith("eval/")} - {"all"})
    rows = [[heading for heading, _ in COLUMNS]]
    for env in [*environments, "all"]:
        names = (name.replace("pass_at_k", f"pass_at_{samples}") for _, name in COLUMNS[1:])
        rows.append([env, *(_cell(name, metrics.get(f"eval/{env}/{name}")) for name in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name in COUNTS:
        return f"{value:.0f}"
    return f"{value:.1f}" if name == "avg_turns" else f"{value:.3f}"
