"""Render the document as Markdown: curves become rows of figures, comparisons show the first difference only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from megatron_fleet.analysis.document import (
    Block,
    Browser,
    Cell,
    Charts,
    Comparison,
    Document,
    Facts,
    Items,
    Table,
    Text,
)
from megatron_fleet.analysis.pairs import Pair

MAX_PAIRS = 6
EXCERPT = 400
_BARS = "▁▂▃▄▅▆▇█"
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def render(document: Document) -> str:
    """Return the whole report. Trajectory text is escaped, so it appears literally and forms no markup."""
    lines = [f"# {escape(document.title)}", "", escape(document.subtitle), ""]
    for section in document.sections:
        if any(isinstance(block, Browser) for block in section.blocks):
            continue
        lines += [f"## {escape(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def escape(text: str) -> str:
    """Escape text to one line that does not affect the markup around it."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as at most ``width`` bars, scaled from the lowest to the highest."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values), max(values)
    span = high - low
    return "".join(_BARS[int((v - low) / span * (len(_BARS) - 1) + 0.5)] if span else _BARS[0] for v in values)


def _block(block: Block) -> list[str]:
    match block:
        case Text():
            return [escape(block.text)]
        case Items():
            return [f"- {escape(item)}" for item in block.items]
        case Facts():
            facts = [(escape(f.label), escape(f.value), escape(f.detail)) for f in block.facts]
            return _table(("", "", ""), facts)
        case Table():
            rows = [tuple(_cell(cell) for cell in row) for row in block.rows]
            return _table([escape(h) for h in block.head], rows, block.numbers)
        case Charts():
            return _charts(block)
        case Comparison():
            return [line for pair in block.pairs[:MAX_PAIRS] for line in _pair(pair)]
        case Browser():
            return []


def _cell(cell: Cell) -> str:
    return escape(cell.text) + (f" ({', '.join(cell.links)})" if cell.links else "")


def _charts(block: Charts) -> list[str]:
    rows = []
    for chart in block.charts:
        for series in chart.series:
            values = [value for _, value in series.points]
            figures = (values[0], values[-1], min(values), max(values))
            rows.append((escape(chart.title), escape(series.label), *(f"{v:.4g}" for v in figures), sparkline(values)))
    return _table(("curve", "line", "first", "last", "lowest", "highest", ""), rows, frozenset({2, 3, 4, 5}))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset()) -> list[str]:
    rule = ["--:" if i in numbers else "---" for i in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def _pair(pair: Pair) -> list[str]:
    lines = [f"**{escape(pair.before.env)} {escape(pair.before.task)}** \\#{pair.before.sample}: {pair.verdict}", ""]
    if pair.divergence is None:
        return [*lines, "The conversations are equal.", ""]
    lines += [f"First difference: message {pair.divergence + 1}.", ""]
    for name, episode in (("before", pair.before), ("after", pair.after)):
        role, text = episode.messages[pair.divergence] if pair.divergence < len(episode.messages) else ("", "(ended)")
        lines.append(f"- {name} ({escape(role)}): {escape(text[:EXCERPT])}")
    return [*lines, ""]
