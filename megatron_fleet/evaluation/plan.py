"""Choice of the held-out tasks for an evaluation, and notes about it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron_fleet.data.near import near_duplicates
from megatron_fleet.data.split import key_hash
from megatron_fleet.data.task import Task

FEW_TASKS = 5
"""With fewer distinct tasks an environment's pass rate is not meaningful."""


def choose(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """Choose at most ``limit`` of ``tasks`` (``None``: all), round-robin over environments, smallest hashes first.

    They are returned in their original order. The order of a file does not affect the choice and added tasks change
    little of it, it agrees with what ``data.max_eval_per_env`` keeps, and a larger limit gives a superset.
    """
    taken: defaultdict[str, int] = defaultdict(int)
    turns = []
    for index in sorted(range(len(tasks)), key=lambda i: key_hash(tasks[i].key)):
        env_key = tasks[index].env_key
        turns.append((taken[env_key], env_key, index))
        taken[env_key] += 1
    return [tasks[index] for index in sorted(index for _, _, index in sorted(turns)[:limit])]


def notes(chosen: Sequence[Task], held_out: Sequence[Task]) -> list[str]:
    """Return sentences to print at the start of an evaluation of ``chosen``, a subset of ``held_out``: tasks left out,
    and environments with fewer than ``FEW_TASKS`` distinct tasks, where near-duplicates (`data.near`) count once."""
    found = []
    if len(chosen) < len(held_out):
        found.append(f"{len(chosen)} of {len(held_out)} evaluation tasks are played (eval.tasks).")
    counts = Counter(task.env_key for task in chosen)
    different = counts - Counter(task.env_key for group in near_duplicates(chosen) for task in group[1:])
    few = [f"{env} {different[env]} of {counts[env]}" for env in sorted(counts) if different[env] < FEW_TASKS]
    if few:
        found.append(
            f"Environments with fewer than {FEW_TASKS} different evaluation tasks, whose pass rates say little (tasks "
            f"with nearly the same prompt count once): {', '.join(few)}."
        )
    return found
