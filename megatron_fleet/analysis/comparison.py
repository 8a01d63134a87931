"""``mfleet runs compare``: curves, results and settings of several runs on one page. The first run is the baseline."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.analysis import render
from megatron_fleet.analysis.document import Block, Cell, Charts, Document, Items, ReportSection, Table, Text
from megatron_fleet.analysis.environments import ALL, MIN_TASKS
from megatron_fleet.analysis.episodes import Episode, shown
from megatron_fleet.analysis.run import EVALUATIONS, Run, read_run
from megatron_fleet.analysis.runs import folder_name
from megatron_fleet.analysis.sections import KIND_LABELS
from megatron_fleet.analysis.statistics import (
    NOTHING,
    RESAMPLES,
    Difference,
    difference,
    number,
    pass_rate,
    rate,
    task_rates,
)
from megatron_fleet.config.differences import OWN_TO_A_RUN, flat
from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.telemetry.charts import CHARTS, ENV, MAX_LINES, Chart, Series, thin
from megatron_fleet.telemetry.console import duration
from megatron_fleet.telemetry.summary import seconds_total

MAX_RUNS = MAX_LINES
"""A chart with more lines is unreadable."""
MAX_ENVIRONMENTS = 24
"""Environments with curves of their own, those that differ most first; tables have all."""
MAX_TASKS = 40
"""Tasks listed by name."""
PER_ENVIRONMENT = ("eval/{env}/pass_at_1", "reward/{env}/avg_raw_reward")
NO_SETTINGS = "These runs have no recorded configuration: {}."


@dataclass(frozen=True, slots=True)
class Compared:
    """One run of a comparison and its name on the page."""

    label: str
    run: Run


def write_comparison(places: Sequence[str], page: Path) -> str:
    """Write the page; return a line per run and the path.

    Raises:
        UserError: not 2 to ``MAX_RUNS`` runs, one of them cannot be read, or the page cannot be written.
    """
    if not 2 <= len(places) <= MAX_RUNS:
        raise UserError(f"{len(places)} runs are named; name 2 to {MAX_RUNS}, the one to compare with first.")
    if page.suffix != ".html":
        raise UserError(f"--out={page}: the name must end in .html; name another file.")
    runs = named([read_run(place) for place in places])
    content = render.html(build(runs))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        if page.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        write_atomically(page, content)
    except OSError as e:
        raise UserError(f"{page} cannot be written ({e.strerror}); name another file.") from e
    lines = [*_summary(runs), f"{page} ({len(content) / 1e6:.1f} MB)"]
    return "\n".join(map(shown, lines))


def named(runs: Sequence[Run]) -> list[Compared]:
    """Give each run a name that no other has: its folder's, its place as it was typed, or that with a number."""
    places = [shown(str(run.folder) if run.files is None else run.files.place) for run in runs]
    labels = [folder_name(place) for place in places]
    if len(set(labels)) < len(labels):
        labels = places
    if len(set(labels)) < len(labels):
        labels = [f"{number} {label}" for number, label in enumerate(labels, 1)]
    return [Compared(label, run) for label, run in zip(labels, runs, strict=True)]


def build(runs: Sequence[Compared]) -> Document:
    """Build the page."""
    sections = (_head(runs), _results(runs), _curves(runs), _settings(runs), _tasks(runs), _definitions(runs))
    names = " · ".join(one.label for one in runs)
    return Document(f"Comparison of {len(runs)} runs", names, sections)


def _summary(runs: Sequence[Compared]) -> list[str]:
    lines = []
    for one in runs:
        kind, step, episodes = _last(one)
        if step is None:
            lines.append(f"{one.label}: no evaluation")
            continue
        found = difference(_rates(runs[0]), task_rates(episodes)) if one is not runs[0] else None
        more = "" if found is None else f", {_told(found)} against {runs[0].label}"
        lines.append(f"{one.label}: pass@1, {KIND_LABELS[kind]}, step {step}: {rate(pass_rate(episodes))}{more}")
    return lines


def _last(one: Compared) -> tuple[str, int | None, list[Episode]]:
    """Return kind, step and episodes of the last evaluation."""
    for kind in EVALUATIONS:
        if steps := one.run.evaluations.get(kind):
            return kind, steps[-1], one.run.evaluation(kind, steps[-1])
    return EVALUATIONS[0], None, []


def _rates(one: Compared) -> dict[str, float]:
    return task_rates(_last(one)[2])


def _told(found: Difference) -> str:
    over = f"{found.estimate.tasks} shared tasks" if found.paired else "no shared task, unpaired"
    return f"{rate(found.estimate, signed=True)} ({over})"


def _head(runs: Sequence[Compared]) -> ReportSection:
    head = (
        "run",
        "pass@1, last evaluation",
        "minus the first run",
        "over",
        "steps",
        "episodes",
        "time",
        "model",
        "tasks",
    )
    table = Table(head, tuple(_run_row(runs[0], one) for one in runs), frozenset({1, 2, 4, 5}))
    notes = [f"{one.label}: {note}" for one in runs for note in dict.fromkeys(one.run.notes)]
    hashes = {str(one.run.split.get("sha256")) for one in runs if one.run.split.get("sha256")}
    if len(hashes) > 1:
        notes.insert(0, "The runs have different task files: tasks of one key may differ in content.")
    thresholds = {one.run.pass_threshold for one in runs}
    if len(thresholds) > 1:
        notes.insert(
            0, f"The runs count a task as solved from different rewards (eval.pass_threshold): {sorted(thresholds)}."
        )
    if len({_last(one)[1] for one in runs}) > 1:
        notes.insert(
            0, "The last evaluations are after different numbers of steps; Environments has the last common one."
        )
    kinds = {_last(one)[0] for one in runs if _last(one)[1] is not None}
    if len(kinds) > 1:
        notes.insert(0, "The last evaluations above are greedy for some runs and sampled for others.")
    blocks: tuple[Block, ...] = (table, *([Items(tuple(notes), "warn")] if notes else []))
    return ReportSection("summary", "Summary", blocks)


def _run_row(first: Compared, one: Compared) -> tuple[Cell, ...]:
    run, (kind, step, episodes) = one.run, _last(one)
    found = None if one is first else difference(_rates(first), task_rates(episodes))
    over = NOTHING if found is None else f"{found.estimate.tasks} shared tasks" if found.paired else "unpaired"
    steps = [row["step"] for row in run.rows if "accounting/episodes" in row] or run.training_steps
    played = sum(row.get("accounting/episodes") or 0 for row in run.rows)
    timed = any("time" in row for row in run.rows)
    digest = str(run.split.get("sha256") or "")
    estimate = pass_rate(episodes)
    place = shown(str(run.folder) if run.files is None else run.files.place)
    return (
        Cell(one.label, title=place),
        Cell(rate(estimate), estimate.value if estimate else None, title=f"{KIND_LABELS[kind]}, step {step}"),
        _difference_cell(found),
        Cell(over, tone="" if found is None or found.paired else "warn"),
        Cell(str(max(steps, default=0)), max(steps, default=0)),
        Cell(number(played) if played else NOTHING, played),
        Cell(duration(seconds_total(run.rows)) if timed else NOTHING),
        Cell(run.model.rstrip("/").rpartition("/")[2] or NOTHING, title=run.model),
        Cell(f"{digest[:12]}…" if digest else NOTHING, title=digest),
    )


def _difference_cell(found: Difference | None) -> Cell:
    if found is None:
        return Cell(NOTHING)
    e = found.estimate
    tone = ""
    if e.tasks >= MIN_TASKS and e.low is not None and e.high is not None:
        tone = "good" if e.low > 0 else "bad" if e.high < 0 else ""
    over = f"{e.tasks} shared tasks" if found.paired else "no shared tasks: unpaired"
    return Cell(rate(e, signed=True), e.value, tone, over)


def _results(runs: Sequence[Compared]) -> ReportSection:
    blocks: list[Block] = []
    for kind in EVALUATIONS:
        steps = [one.run.evaluations.get(kind, []) for one in runs]
        having = [(one, own[-1]) for one, own in zip(runs, steps, strict=True) if own]
        if not having:
            continue
        last = ", ".join(f"{one.label} step {step}" for one, step in having)
        blocks += [Text(f"pass@1, {KIND_LABELS[kind]}, last evaluation of each run: {last}."), _table(kind, having)]
        common = set(steps[0]).intersection(*map(set, steps))
        if common and len({step for _, step in having}) > 1:
            step = max(common)
            blocks.append(Text(f"pass@1, {KIND_LABELS[kind]}, step {step}, the last that all of them evaluated:"))
            blocks.append(_table(kind, [(one, step) for one in runs]))
    return ReportSection("environments", "Environments", tuple(blocks) or (Text("There are no evaluations."),))


def _table(kind: str, moments: Sequence[tuple[Compared, int]]) -> Table:
    """Build a row for each environment with pass@1 of each run and what it has more than the first."""
    found = [one.run.evaluation(kind, step) for one, step in moments]
    envs = [ALL, *sorted({e.env for episodes in found for e in episodes})]
    head = ["environment", moments[0][0].label]
    for one, _ in moments[1:]:
        head += [one.label, f"{one.label} − {moments[0][0].label}"]
    rows = []
    for env in envs:
        own = [[e for e in episodes if env in (ALL, e.env)] for episodes in found]
        cells = [Cell(env), _rate_cell(own[0])]
        for episodes in own[1:]:
            cells += [_rate_cell(episodes), _difference_cell(difference(task_rates(own[0]), task_rates(episodes)))]
        rows.append(tuple(cells))
    return Table(tuple(head), tuple(rows), frozenset(range(1, len(head))))


def _rate_cell(episodes: Sequence[Episode]) -> Cell:
    estimate = pass_rate(episodes)
    unknown = sum(e.solved is None for e in episodes)
    title = f"{estimate.tasks if estimate else 0} tasks, {len(episodes)} episodes, {unknown} with unknown reward"
    return Cell(rate(estimate), estimate.value if estimate else None, title=title)


def _tasks(runs: Sequence[Compared]) -> ReportSection:
    """List the shared tasks whose pass@1 differs most between the first run and any other."""
    rates = [_rates(one) for one in runs]
    envs = {e.task: e.env for one in runs for e in _last(one)[2]}
    spread = {
        task: max(abs(own[task] - first) for own in rates[1:] if task in own)
        for task, first in rates[0].items()
        if any(task in own for own in rates[1:])
    }
    chosen = [task for task in sorted(spread, key=lambda task: (-spread[task], task)) if spread[task] > 0][:MAX_TASKS]
    if not chosen:
        return ReportSection(
            "tasks", "Tasks", (Text("All shared tasks have the same pass@1 in every run as in the first."),)
        )
    differing = sum(value > 0 for value in spread.values())
    text = f"{differing} of {len(spread)} shared tasks differ in the last evaluations; those that differ most:"
    rows = tuple((Cell(envs[task]), Cell(task), *(_share_cell(own.get(task)) for own in rates)) for task in chosen)
    head = ("environment", "task", *(one.label for one in runs))
    return ReportSection("tasks", "Tasks", (Text(text), Table(head, rows, frozenset(range(2, len(head))))))


def _share_cell(share: float | None) -> Cell:
    return Cell(NOTHING if share is None else f"{share:.2f}", share)


def _curves(runs: Sequence[Compared]) -> ReportSection:
    whole = [
        _chart(f"{title}: {label}" if len(lines) > 1 else title, share, runs, name)
        for title, share, lines in CHARTS
        for name, label in lines.items()
        if ENV not in name
    ]
    blocks: list[Block] = [Charts(found)] if (found := tuple(filter(None, whole))) else []
    for name in PER_ENVIRONMENT:
        title = next(title for title, _, lines in CHARTS if name in lines)
        envs = _environments(runs, name)
        single = tuple(
            filter(None, (_chart(env, True, runs, name.replace(ENV, env)) for env in envs[:MAX_ENVIRONMENTS]))
        )
        if single:
            cut = f"; {MAX_ENVIRONMENTS} of {len(envs)}" if len(envs) > MAX_ENVIRONMENTS else ""
            blocks += [Text(f"{title}{cut}:"), Charts(single)]
    return ReportSection("curves", "Curves", tuple(blocks) or (Text("There are no metrics to draw."),))


def _environments(runs: Sequence[Compared], pattern: str) -> list[str]:
    """Return the environments that have a metric, those first whose last values differ most between the runs."""
    before, after = pattern.split(ENV)
    last: dict[str, list[float]] = {}
    for one in runs:
        for name, value in {k: v for row in one.run.rows for k, v in row.items()}.items():
            env = name.removeprefix(before).removesuffix(after)
            if name == f"{before}{env}{after}" and "/" not in env and env != ALL:
                last.setdefault(env, []).append(value)
    return sorted(last, key=lambda env: (min(last[env]) - max(last[env]), env))


def _chart(title: str, share: bool, runs: Sequence[Compared], name: str) -> Chart | None:
    series = []
    for one in runs:
        points = [(float(row["step"]), float(row[name])) for row in one.run.rows if row.get(name) is not None]
        if points:
            series.append(Series(one.label, thin(points), name.startswith("eval/")))
    if not series:
        return None
    within = all(0 <= value <= 1 for own in series for _, value in own.points)
    return Chart(title, tuple(series), share and within)


def _settings(runs: Sequence[Compared]) -> ReportSection:
    known = [one for one in runs if one.run.config]
    unknown = [one.label for one in runs if not one.run.config]
    blocks: list[Block] = [Text(NO_SETTINGS.format(", ".join(unknown)))] if unknown else []
    settings = [dict(flat(one.run.config)) for one in known]
    rows = differing(settings)
    if rows:
        head = ("key", *(one.label for one in known))
        cells = ((Cell(key), *(Cell(_value(own, key)) for own in settings)) for key in rows)
        blocks.append(Table(head, tuple(map(tuple, cells))))
    elif len(known) > 1:
        blocks.append(Text("All settings are equal."))
    return ReportSection("settings", "Settings that differ", tuple(blocks))


def differing(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys that do not have one value in all configurations, but for id and folder."""
    keys: Counter[str] = Counter(key for own in settings for key in own)
    return [
        key
        for key in sorted(keys.keys() - OWN_TO_A_RUN)
        if keys[key] < len(settings) or any(own[key] != settings[0][key] for own in settings)
    ]


def _value(own: Mapping[str, object], key: str) -> str:
    return NOTHING if key not in own else "null" if own[key] is None else shown(str(own[key]))


def _definitions(runs: Sequence[Compared]) -> ReportSection:
    thresholds: Iterable[float] = dict.fromkeys(one.run.pass_threshold for one in runs)
    values = ", ".join(f"{threshold:g}" for threshold in thresholds)
    text = (
        f"A task is solved when its reward is at least {values} (eval.pass_threshold). An unknown reward is in no mean "
        "and is never counted as 0. pass@1 is the mean over tasks of the share of attempts that solved the task. "
        f"Brackets hold 95 % percentile bootstrap intervals over tasks ({RESAMPLES} resamples, fixed seed). "
        f"Differences are those from {runs[0].label}: where two runs share tasks, the mean over these of the "
        f"differences of each task, which are resampled (a paired bootstrap); where they share no tasks, the tasks of "
        f"each run are resampled by themselves. They are coloured from {MIN_TASKS} tasks on when the interval does not "
        f"hold 0. Each interval is for itself: among twenty comparisons of equal runs one is coloured on average. An "
        f"interval says how results vary over tasks, not over repetitions of a run with other seeds."
    )
    return ReportSection("method", "Definitions", (Text(text),))
