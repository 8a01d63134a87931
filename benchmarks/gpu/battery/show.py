"""Terminal output of the battery: the list of parts, its progress, and the summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from battery.registry import Goal, Part
from battery.results import Result

WIDTH = 132
MARKS = {True: "met", False: "NOT MET", None: "not measured"}


def console() -> Console:
    """The terminal's width, or a fixed one for files."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)


def listing(parts: Sequence[tuple[Part, str | None]], device: str) -> Table:
    """Parts in order, with their limits and what speaks against each here."""
    table = Table(title=f"Parts, on {device}")
    for heading in ("part", "minutes", "measures", "here"):
        table.add_column(heading, justify="right" if heading == "minutes" else "left")
    for part, problem in parts:
        table.add_row(part.name, f"{part.minutes:g}", part.about, problem or "can run")
    return table


def summary(results: Sequence[Result]) -> Table:
    """Status and figures of each part."""
    table = Table(title="Results")
    for heading in ("part", "status", "s", "figures, or why not"):
        table.add_column(heading, justify="right" if heading == "s" else "left", overflow="fold")
    for result in results:
        table.add_row(result.part, result.status, f"{result.seconds:.0f}", says(result))
    return table


def says(result: Result) -> str:
    """Figures of a result in one text, after its reason."""
    figures = ", ".join(f"{name} {short(value)}" for name, value in result.figures.items())
    left = "".join(f"; left out: {what} ({why})" for what, why in result.left_out.items())
    return "; ".join(filter(None, [result.reason, figures])) + left


def goals(results: Mapping[str, Result], parts: Sequence[Part]) -> Table:
    """Goals of one H200: met or not."""
    table = Table(title="Goals (of one H200)")
    for heading in ("goal", "measured", "asked", ""):
        table.add_column(heading)
    for row in goal_rows(results, parts):
        table.add_row(*row)
    return table


def goal_rows(results: Mapping[str, Result], parts: Sequence[Part]) -> list[tuple[str, str, str, str]]:
    """Each goal with its measured figure, its bound, and whether it is met."""
    return [
        (goal.says, short(result.figures.get(goal.figure, "")), bound(goal), MARKS[goal.met(result)])
        for part in parts
        for goal in part.goals
        for result in [results.get(part.name) or Result(part.name)]
    ]


def bound(goal: Goal) -> str:
    """The bound with its direction."""
    return f"{'≥' if goal.kind == 'least' else '≤'} {goal.bound:g}"


def short(value: object) -> str:
    """A figure in at most four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


class Progress:
    """Lines on stderr: what part runs and what it measures."""

    def __init__(self, count: int) -> None:
        self._count, self._number, self._doing = count, 0, ""

    def begin(self, part: Part) -> None:
        """A part begins."""
        self._number, self._doing = self._number + 1, ""
        self._say(f"[{self._number}/{self._count}] {part.name}: {part.about}")

    def tick(self, result: Result | None) -> None:
        """Say what the part measures now, where that is new."""
        if result is not None and result.doing and result.doing != self._doing:
            self._doing = result.doing
            self._say(f"    {result.doing}")

    def end(self, result: Result, note: str = "") -> None:
        """A part has ended."""
        text = f"    {result.status}{note}, {result.seconds:.0f} s"
        self._say(f"{text}: {result.reason}" if result.reason else text)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
