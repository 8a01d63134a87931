"""Render the document as one HTML page: no network access, no markup from trajectories, only its own script may run."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources

import jinja2
from markupsafe import Markup

from megatron_fleet.analysis import svg
from megatron_fleet.analysis.document import Document
from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.failures import CATEGORIES
from megatron_fleet.analysis.transcripts import Transcripts

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def render(document: Document, transcripts: Transcripts) -> bytes:
    """Return the page in UTF-8. Unpaired surrogates, which JSON can contain, become question marks."""
    files = resources.files("megatron_fleet.analysis") / "page"
    template, style, script = (
        (files / name).read_text(encoding="utf-8") for name in ("report.html", "report.css", "report.js")
    )
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(template).render(
        document=document,
        shown=transcripts.blobs.keys(),
        draw=lambda chart: Markup(svg.draw(chart)),
        reward=reward_text,
        style=Markup(style),
        style_hash=_csp_hash(style),
        script=Markup(script),
        script_hash=_csp_hash(script),
        index=_data(json.dumps(transcripts.index(), ensure_ascii=False, separators=(",", ":"))),
        labels=_data(json.dumps({c.key: c.label for c in CATEGORIES})),
        pieces=_data(json.dumps(transcripts.pieces, ensure_ascii=False, separators=(",", ":"))),
        images=_data(json.dumps(transcripts.images(), separators=(",", ":"))),
        blobs=[(id, _data(blob)) for id, blob in transcripts.blobs.items()],
    )
    return page.encode("utf-8", "replace")


def reward_text(episode: Episode) -> str:
    return "unknown" if episode.reward is None else f"{episode.reward:g}"


def _data(content: str) -> Markup:
    """Escape JSON for a data ``script`` element, so that nothing in it can close the element or open another."""
    return Markup(content.translate(_ESCAPES))


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
