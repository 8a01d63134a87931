"""Per-environment table of a dataset, accounting for every task."""

from __future__ import annotations

from collections import Counter, defaultdict

from megatron_fleet.data.dataset import Dataset

ALL = "all"
"""Name of the last row, the totals."""


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
