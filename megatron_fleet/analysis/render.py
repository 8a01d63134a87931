"""The document as one HTML page and as Markdown.

The page needs no network, has no markup from trajectories, and only its own script may run. In Markdown, curves become
rows of figures, and comparisons show the first difference only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

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
from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.failures import CATEGORIES
from megatron_fleet.analysis.selection import Pair
from megatron_fleet.analysis.transcripts import Transcripts
from megatron_fleet.telemetry.charts import STYLE, draw, sparkline

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}
MARKDOWN_PAIRS = 6
EXCERPT = 400
SPARK_WIDTH = 24
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")


def html(document: Document, transcripts: Transcripts | None = None) -> bytes:
    """Return the page in UTF-8. Unpaired surrogates, which JSON can contain, become question marks.

    Args:
        transcripts: the trajectories of the page, if it has any.
    """
    files = resources.files("megatron_fleet.analysis") / "page"
    names = ("report.html", "report.css", "parts.js", "report.js")
    template, style, parts, script = ((files / name).read_text(encoding="utf-8") for name in names)
    style, script = STYLE + style, parts + script
    blobs, pieces, index, images = ({}, {}, [], {}) if transcripts is None else _of(transcripts)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(template).render(
        document=document,
        shown=blobs.keys(),
        draw=lambda chart: Markup(draw(chart)),
        reward=reward_text,
        style=Markup(style),
        style_hash=_csp_hash(style),
        script=Markup(script),
        script_hash=_csp_hash(script),
        index=_data(json.dumps(index, ensure_ascii=False, separators=(",", ":"))),
        labels=_data(json.dumps({c.key: c.label for c in CATEGORIES})),
        pieces=_data(json.dumps(pieces, ensure_ascii=False, separators=(",", ":"))),
        images=_data(json.dumps(images, separators=(",", ":"))),
        blobs=blobs,
    )
    return page.encode("utf-8", "replace")


def _of(t: Transcripts) -> tuple[dict[str, str], dict[int, str], list[list[Any]], dict[str, str]]:
    return t.blobs, t.pieces, t.index(), t.images()


def reward_text(episode: Episode) -> str:
    return "unknown" if episode.reward is None else f"{episode.reward:g}"


def _data(content: str) -> Markup:
    """Escape JSON for a data ``script`` element, so that nothing in it can close the element or open another."""
    return Markup(content.translate(_ESCAPES))


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def markdown(document: Document) -> str:
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
            return [line for pair in block.pairs[:MARKDOWN_PAIRS] for line in _pair(pair)]
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
            rows.append(
                (
                    escape(chart.title),
                    escape(series.label),
                    *(f"{v:.4g}" for v in figures),
                    sparkline(values, SPARK_WIDTH),
                )
            )
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
