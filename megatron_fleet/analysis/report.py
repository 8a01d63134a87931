"""``mfleet report``: read a run, assemble the document, write page and Markdown, summarise it on the terminal."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

from megatron_fleet.analysis import render, sections
from megatron_fleet.analysis.document import Document, Facts
from megatron_fleet.analysis.environments import ALL, FINE, EnvironmentResult, Status, environment_results, signals
from megatron_fleet.analysis.episodes import Episode, shown
from megatron_fleet.analysis.failures import CATEGORIES, by_category
from megatron_fleet.analysis.rollout_tail import rollout_tail
from megatron_fleet.analysis.run import EVALUATIONS, Run, read_run
from megatron_fleet.analysis.selection import EpisodeTime, Pair, browsable, choose_pairs
from megatron_fleet.analysis.statistics import rate, value
from megatron_fleet.analysis.transcripts import Transcripts
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import environment_name
from megatron_fleet.storage.local import write_atomically

PAGE_LIMIT = 20_000_000
"""Maximum size of a page in bytes."""
TRANSCRIPTS_LIMIT = 8_000_000
"""Part of it for trajectories without their images: some hundred long ones. A browser opens a page in proportion to its
bytes, a page of this size in less than half a second of processor time."""
RESERVED = 3_000_000
"""Part of it reserved for everything but trajectories, which takes about 0.2 MB with ten environments."""
SUMMARY_LINES = 10
ATTENTION = (Status.WORSE, Status.UNKNOWN, Status.FAILING, Status.IMPROVED, Status.SATURATED)
"""Order in which the summary lists environments by status, since it has room for only a few."""


def write_report(place: Path | str, page: Path | None = None, text: Path | None = None) -> str:
    """Write ``report.html`` and ``report.md`` below the run's folder, or where the arguments say; those of a run in a
    store go to the current folder, with the run's id in their names.

    Returns:
        A summary and the paths of both files, at most ``SUMMARY_LINES`` + 2 lines.

    Raises:
        UserError: ``place`` is not a run, a file cannot be written or has the name of another kind of file.
    """
    for option, path, suffix in (("--out", page, ".html"), ("--markdown", text, ".md")):
        # A former report is replaced, so nothing else may be named.
        if path is not None and path.suffix != suffix:
            raise UserError(f"{option}={path}: the name must end in {suffix}; name another file.")
    run = read_run(place)
    document, transcripts = build(run)
    remote = run.files is not None and run.files.remote
    stem = Path(f"{environment_name(run.id)}.report") if remote else run.folder / "report"
    targets = {
        page or stem.with_name(f"{stem.name}.html"): render.html(document, transcripts),
        text or stem.with_name(f"{stem.name}.md"): render.markdown(document).encode("utf-8", "replace"),
    }
    for path, content in targets.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            write_atomically(path, content)
        except OSError as e:
            raise UserError(f"{path} cannot be written ({e.strerror}); name another file.") from e
    written = [f"{path} ({len(content) / 1e6:.1f} MB)" for path, content in targets.items()]
    return "\n".join(map(shown, [*_summary(run, document.sections[0]), *written]))


def build(run: Run, limit: int = PAGE_LIMIT) -> tuple[Document, Transcripts]:
    """Build the document of a run and the trajectories that fit into a page of ``limit`` bytes."""
    kind = run.main_kind
    first, last = run.first_and_last(kind)
    pairs = choose_pairs(run.episodes(kind, first), run.episodes(kind, last))
    episodes, totals, times = browsable(run)
    room = limit - min(RESERVED, limit // 2)
    transcripts = Transcripts(run, min(room, TRANSCRIPTS_LIMIT), room)
    transcripts.add(_examples(run, kind))
    transcripts.add(episode for pair in pairs for episode in (pair.before, pair.after))
    transcripts.add(episodes)
    # The head is built last, because it lists the notes added by the other sections.
    rest = _after_head(run, pairs, times, _shown(run, transcripts, totals, limit))
    subtitle = " · ".join([run.id, *([f"model {run.model}"] if run.model else [])])
    return Document(run.title, subtitle, (sections.head(run), *rest)), transcripts


def _shown(run: Run, transcripts: Transcripts, totals: dict[tuple[str, int], int], limit: int) -> list[str]:
    """Return one sentence per reason for which episodes are missing from the page; none when all are shown."""
    shown = Counter((e.kind, e.step) for e in transcripts.episodes)
    cut = [f"{kind} {step}: {shown[kind, step]} of {total}" for (kind, step), total in totals.items()]
    steps = sum(kind == "step" for kind, _ in totals)
    lines = []
    if shown.total() < sum(totals.values()):
        lines.append(f"{shown.total()} of {sum(totals.values())} episodes are on this page ({'; '.join(cut)}).")
    if steps < len(run.training_steps):
        lines.append(f"Of {len(run.training_steps)} training steps {steps} were read, evenly spaced.")
    if transcripts.left_out:
        lines.append(f"{transcripts.left_out} of those chosen did not fit into the page.")
    return lines


def _after_head(
    run: Run, pairs: list[Pair], times: list[EpisodeTime], shown: list[str]
) -> tuple[sections.ReportSection, ...]:
    if run.is_evaluation:
        return (
            sections.environments(run),
            sections.behaviour(run),
            sections.errors(run),
            sections.trajectories(shown),
            sections.method(run),
        )
    return (
        sections.environments(run),
        sections.curves(run),
        sections.learning_signal(run),
        rollout_tail(run.rows, times),
        sections.behaviour(run),
        sections.errors(run),
        sections.differences(run, pairs),
        sections.trajectories(shown),
        sections.method(run),
    )


def _examples(run: Run, kind: str) -> list[Episode]:
    """Return the episodes that the error table links to."""
    steps = [step for step in reversed(run.first_and_last(kind)) if step is not None]
    found = [by_category(run.episodes(kind, step)) for step in steps]
    return [
        episode
        for category in CATEGORIES
        for episode, _ in [pair for categories in found for pair in categories[category.key]][: sections.EXAMPLES]
    ]


def _summary(run: Run, first: sections.ReportSection) -> list[str]:
    """Return at most ``SUMMARY_LINES`` lines: figures of the head, environments (in the order of ``ATTENTION``), advice
    and notes."""
    facts = [fact for block in first.blocks if isinstance(block, Facts) for fact in block.facts]
    lines = [f"{fact.label}: {fact.value} ({fact.detail})" for fact in facts if fact.label not in ("model", "tasks")]
    kind = run.main_kind
    results = [r for r in environment_results(run, kind) if r.env != ALL and kind in EVALUATIONS]
    results.sort(key=_attention)
    needy = [f"{s.env}: {s.advice}" for s in signals(run.rows) if s.advice != FINE]
    before = "" if run.first_and_last(kind)[1] is None else "{} → "
    lines += [f"{r.env}: {before.format(value(r.before))}{rate(r.after)} {r.status}" for r in results]
    lines += needy + run.notes
    if len(lines) > SUMMARY_LINES:
        lines = [*lines[: SUMMARY_LINES - 1], f"… {len(lines) - SUMMARY_LINES + 1} more lines are in the report"]
    return lines


def _attention(result: EnvironmentResult) -> int:
    return ATTENTION.index(result.status) if result.status in ATTENTION else len(ATTENTION)
