"""What is in a task file, in a few lines: the text of ``mfleet tasks inspect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_fleet.config.schema import Data
from megatron_fleet.data.loader import load_tasks
from megatron_fleet.data.split import split
from megatron_fleet.data.task import Task

EVAL_FRACTION: float = Data.model_fields["eval_fraction"].get_default()


def describe(path: str) -> str:
    """Counts per environment, modality and difficulty, and the split that the default fraction gives.

    Raises:
        UserError: the file is no task file; names row, field and expectation.
    """
    tasks = load_tasks(path)
    train, held_out = split(tasks, EVAL_FRACTION)
    lines = [
        f"{path}: {len(tasks)} tasks, {len(train)} for training and {len(held_out)} held out "
        f"(data.eval_fraction={EVAL_FRACTION:g})"
    ]
    in_training = Counter(task.env_key for task in train)
    for env_key, count in sorted(Counter(task.env_key for task in tasks).items()):
        lines.append(f"  {env_key}: {count} ({in_training[env_key]} for training)")
    lines.append("  modality: " + _counts(task.modality for task in tasks))
    lines.append("  difficulty: " + _counts(_difficulty(task) for task in tasks))
    lines.append(f"  longest prompt: {max((len(task.prompt) for task in tasks), default=0)} characters")
    return "\n".join(lines)


def _difficulty(task: Task) -> str:
    return "unknown" if task.difficulty is None else str(task.difficulty)


def _counts(values: Iterable[str]) -> str:
    return ", ".join(f"{value} {count}" for value, count in sorted(Counter(values).items())) or "none"
