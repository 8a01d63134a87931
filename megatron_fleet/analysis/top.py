"""`mfleet top`: the contents of the live page on a terminal, for one run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megatron_fleet.analysis.live.follow import RunFollower
from megatron_fleet.analysis.live.view import now
from megatron_fleet.config.errors import printable

REFRESH_S = 1.0
BAR = 40
"""Width of the longest step."""
ALERTS = 5
"""Newest alerts that are shown."""
ROWS = 12
"""Rows of a table that are shown."""
LEFT_OUT = ("signal", "turns", "s / episode")
"""Columns of the page for which a terminal has no room."""
LETTERS = {"generate": "g", "data": "d", "move": "m", "train": "t", "sync": "s", "eval": "e", "save": "c", "other": "o"}
"""Letter of a kind of phase in the bars, which also tell it without colours."""
COLOURS = {
    "generate": "cyan",
    "data": "white",
    "move": "yellow",
    "train": "green",
    "sync": "magenta",
    "eval": "blue",
    "save": "red",
    "other": "bright_black",
}
TONES = {"good": "green", "warn": "yellow", "bad": "bold red", "quiet": "dim"}


def main(folder: Path, once: bool) -> int:
    """Show a run until Ctrl-C; returns the exit status.

    Args:
        once: print one frame instead.

    Raises:
        UserError: the folder does not exist.
    """
    follower, console = RunFollower(folder), Console()
    if once or not console.is_terminal:
        console.print(frame(follower))
        return 0
    with Live(frame(follower), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(frame(follower), refresh=True)


def frame(follower: RunFollower, clock: float | None = None) -> RenderableType:
    """Read what is new and return what to show. ``clock``: unix time; ``None``: now."""
    follower.look()
    seen = now(follower, time.time() if clock is None else clock)
    return Group(*_parts(seen))


def _parts(seen: Mapping[str, Any]) -> Iterator[RenderableType]:
    state = seen["state"]
    about = _said(f"{state['detail']} · {seen['subtitle']}", "dim")
    name, what = _said(seen["name"], "bold"), _said(state["text"], TONES.get(state["tone"], ""))
    yield Text.assemble(name, "  ", what, "  ", about)
    yield _facts(seen["facts"])
    if timeline := _timeline(seen["timeline"]):
        yield Rule("steps", align="left", style="dim")
        yield timeline
    for name, table in seen["tables"].items():
        if table["rows"]:
            yield Rule(name, align="left", style="dim")
            yield _table(table)
    alerts = seen["alerts"][:ALERTS]
    if alerts:
        yield Rule("alerts", align="left", style="dim")
    for alert in alerts:
        at = time.strftime("%H:%M:%S", time.localtime(alert["time"]))
        yield Text.assemble((at, "dim"), "  ", _said(alert["text"], "red" if alert["level"] == "ERROR" else "yellow"))
    for note in seen["notes"]:
        yield _said(note, "yellow")


def _facts(facts: Sequence[Mapping[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for fact in facts:
        table.add_row(
            _said(fact["label"], "dim"),
            _said(fact["value"], "bold"),
            _said(fact["detail"]),
        )
    return table


def _timeline(timeline: Mapping[str, Any]) -> RenderableType | None:
    """Return a bar for each step, the current one first."""
    steps = [*([timeline["current"]] if timeline["current"] else []), *timeline["steps"]]
    if not steps:
        return None
    longest = max(step["seconds"] for step in steps) or 1.0
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for step in steps:
        table.add_row(Text(step["step"]), _bar(step["parts"], longest), _said(step["text"]))
    legend = Text()
    for kind, label in timeline["legend"]:
        legend.append(f"{LETTERS[kind]} {label}  ", COLOURS[kind])
    return Group(table, legend)


def _bar(parts: Sequence[Mapping[str, Any]], longest: float) -> Text:
    """Draw the phases of a step; where several run at once, the last one to begin."""
    cells = [""] * BAR
    for part in parts:
        first = min(round(part["start"] / longest * BAR), BAR - 1)
        last = max(round((part["start"] + part["seconds"]) / longest * BAR), first + 1)
        cells[first:last] = [part["kind"]] * (min(last, BAR) - first)
    bar = Text()
    for kind in cells:
        bar.append(LETTERS.get(kind, " "), COLOURS.get(kind, ""))
    return bar


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    columns = [index for index, head in enumerate(found["head"]) if head not in LEFT_OUT]
    for index in columns:
        justify: Literal["right", "left"] = "right" if index in found["numbers"] else "left"
        table.add_column(printable(found["head"][index]), justify=justify, no_wrap=index == 0)
    rows = found["rows"]
    for row in rows[:ROWS]:
        table.add_row(*(_said(cell["text"], TONES.get(cell["tone"], "")) for cell in (row[index] for index in columns)))
    if len(rows) > ROWS:
        table.add_row(Text(f"{len(rows) - ROWS} more", "dim"))
    return table


def _said(text: str, style: str = "") -> Text:
    """Return text that may quote anything, without what a terminal would obey."""
    return Text(printable(text), style)
