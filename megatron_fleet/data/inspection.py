"""Inspection of a task file before it is used: the report of `mfleet data inspect`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data.dataset import Dataset, divide
from megatron_fleet.data.near import THRESHOLD, near_duplicates
from megatron_fleet.data.rows import KNOWN, Problem, by_kind, described, faults, parse
from megatron_fleet.data.selection import excluded_tasks
from megatron_fleet.data.source import TaskSource, read_source
from megatron_fleet.data.task import Task

SHOWN = 20
MANY_VERSIONS = 5
"""Maximum lines of one kind in the text report; the JSON report has all of them."""
ALL = "all"
"""Name of the last row, the totals."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """Contents of a source.

    Attributes:
        tasks: valid rows, without repeated keys (the first row counts).
        problems: all problems of rows that ``data.exclusions`` does not name; duplicate keys only if
            ``data.duplicates`` refuses them.
        repeated: rows per environment whose key an earlier row has.
        near: groups of tasks whose prompts are nearly identical.
        dataset: dataset that the keys of ``data`` make of the valid rows; ``None`` if there are none.
    """

    source: TaskSource
    tasks: list[Task]
    problems: list[Problem]
    repeated: Counter[str]
    near: list[list[Task]]
    dataset: Dataset | None


def inspect(data: DataConfig, say: Callable[[str], None] = lambda _: None) -> Inspection:
    """Inspect everything in ``data.tasks``, valid or not.

    Raises:
        UserError: it cannot be read, is not a list of rows, or ``data`` fits none of its tasks.
    """
    say(f"reading {data.tasks}")
    source = read_source(data.tasks)
    say(f"checking {len(source.rows)} tasks")
    parsed = parse(source.rows)
    dataset = divide(source, parsed, data) if parsed.tasks else None
    say("looking for near-duplicates")
    near = near_duplicates(parsed.tasks)
    repeated = Counter(task.env_key for task in parsed.repeated)
    problems = faults(parsed, data.duplicates == "first", excluded_tasks(data))
    return Inspection(source, parsed.tasks, problems, repeated, near, dataset)


def as_json(found: Inspection) -> dict[str, Any]:
    """Return the machine-readable report. Lengths are in characters."""
    split = found.dataset.split if found.dataset is not None else None
    return {
        "source": found.source.address,
        "sha256": found.source.sha256,
        "rows": len(found.source.rows),
        "tasks": len(found.tasks),
        "problems": [asdict(problem) for problem in found.problems],
        "problem_kinds": _counts(problem.kind for problem in found.problems),
        "unknown_fields": _counts(
            name for row in found.source.rows if isinstance(row, dict) for name in row if name not in KNOWN
        ),
        "repeated_keys": dict(sorted(found.repeated.items())),
        "modalities": _counts(task.modality for task in found.tasks),
        "difficulties": _counts(str(task.difficulty or "not given") for task in found.tasks),
        "without_current_date": sum("CURRENT_DATE" not in task.env_variables for task in found.tasks),
        "without_verifier": sum(not task.verifier_code.strip() for task in found.tasks),
        "prompt_characters": _lengths(found.tasks),
        "versions": _versions(found.tasks),
        "near_duplicates": [[task.key for task in group] for group in found.near],
        "evaluation_tasks_like_training_tasks": _leaks(found),
        "environments": environments(found.dataset) if found.dataset is not None else {},
        "notes": split.notes if split is not None else [],
    }


def _counts(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _lengths(tasks: Sequence[Task]) -> dict[str, int]:
    if not tasks:
        return {}
    lengths = np.array([len(task.prompt) for task in tasks])
    shares = {"least": 0, "half": 50, "95_percent": 95, "most": 100}
    return {name: int(np.percentile(lengths, share, method="higher")) for name, share in shares.items()}


def _versions(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Count tasks per environment, version and seed data; ``None`` stands for the environment's default."""
    keys = Counter((task.env_key, task.env_version, task.data_key, task.data_version) for task in tasks)
    names = ("environment", "version", "data_key", "data_version")
    ordered = sorted(keys.items(), key=lambda item: tuple(value or "" for value in item[0]))
    return [dict(zip(names, values, strict=True)) | {"tasks": count} for values, count in ordered]


def _leaks(found: Inspection) -> list[str]:
    """Return the keys of evaluation tasks in a group with a training task."""
    if found.dataset is None:
        return []
    train = {task.key for task in found.dataset.split.train}
    held_out = {task.key for task in found.dataset.split.held_out}
    groups = [{task.key for task in group} for group in found.near]
    return sorted(key for group in groups if group & train for key in group & held_out)


def describe(found: Inspection) -> str:
    """Return the human-readable report."""
    report = as_json(found)
    lines = [f"{report['source']}: {report['rows']} rows, {report['tasks']} tasks, sha256 {report['sha256']}"]
    if found.problems:
        lines.append(f"problems: {_listed(report['problem_kinds'])}")
        lines += _shortened([f"  {described(alike)}" for alike in by_kind(found.problems)])
    for name in ("unknown_fields", "repeated_keys", "modalities", "difficulties", "prompt_characters"):
        if report[name]:
            lines.append(f"{name.replace('_', ' ')}: {_listed(report[name])}")
    lines.append(f"without CURRENT_DATE: {report['without_current_date']}")
    lines.append(f"without verifier: {report['without_verifier']}")
    lines.append("versions:")
    lines += _shortened([*_version_lines(report["versions"])])
    lines += _near(found, report)
    if report["environments"]:
        lines += ["with these data.* keys:", as_text(report["environments"]), *report["notes"]]
    return "\n".join(lines)


def _version_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each version; one for an environment in which each of many tasks has its own."""
    for environment, group in groupby(rows, key=lambda row: row["environment"]):
        several = list(group)
        if len(several) >= MANY_VERSIONS and all(row["tasks"] == 1 for row in several):
            yield f"  {environment}: each of {len(several)} tasks has its own version or data"
        else:
            yield from map(_version, several)


def _version(row: dict[str, Any]) -> str:
    environment = f"{row['environment']}:{row['version'] or 'default'}"
    return f"  {environment}, data {row['data_key'] or 'default'}:{row['data_version'] or 'default'}: {row['tasks']}"


def _near(found: Inspection, report: dict[str, Any]) -> list[str]:
    groups, leaks = found.near, len(report["evaluation_tasks_like_training_tasks"])
    if not groups:
        return [f"near-duplicates: none (similarity of prompts ≥ {THRESHOLD:g})"]
    first = (
        f"near-duplicates: {sum(map(len, groups))} tasks in {len(groups)} groups (similarity of prompts ≥ "
        f"{THRESHOLD:g}); {leaks} evaluation tasks are like a training task"
    )
    shown = [f"  {group[0].env_key}: {len(group)} like {group[0].key}: {_quote(group[0].prompt)}" for group in groups]
    return [first, *_shortened(shown)]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _shortened(lines: list[str]) -> list[str]:
    more = [f"  … and {len(lines) - SHOWN} more; --json prints all"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def _quote(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def environments(dataset: Dataset) -> dict[str, dict[str, float]]:
    """Map environment → column → number, ``all`` last.

    Columns: ``total``; each reason for which tasks were removed; ``unused`` and ``retired`` if there are any; ``train``
    and ``eval``; ``eval_share`` of the environment's train + eval, and ``mix``, its share of all training tasks.
    """
    split = dataset.split
    fates = {"unused": split.unused, "retired": split.retired, "train": split.train, "eval": split.held_out}
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for task, reason in dataset.removed:
        counts[task.env_key][reason] += 1
    for fate, tasks in fates.items():
        for task in tasks:
            counts[task.env_key][fate] += 1
    total = sum((counts[env_key] for env_key in sorted(counts)), Counter[str]())
    names = list(dict.fromkeys(reason for _, reason in dataset.removed))
    names += [fate for fate in fates if total[fate] or fate in ("train", "eval")]
    return {
        env_key: {
            "total": row.total(),
            **{name: row[name] for name in names},
            "eval_share": row["eval"] / max(row["train"] + row["eval"], 1),
            "mix": row["train"] / max(total["train"], 1),
        }
        for env_key, row in [*sorted(counts.items()), (ALL, total)]
    }


def as_text(rows: dict[str, dict[str, float]]) -> str:
    """Format the table; shares in per cent, omitted for environments without remaining tasks."""
    columns = list(next(iter(rows.values())))
    cells = [["environment", *(name.replace("_", " ") for name in columns)]]
    for env_key, row in rows.items():
        cells.append([env_key, *(_cell(name, row[name]) for name in columns)])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in cells
    )


def _cell(name: str, value: float) -> str:
    return f"{value:.1%}" if name in ("eval_share", "mix") else str(int(value))
