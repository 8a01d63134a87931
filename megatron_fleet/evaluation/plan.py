"""Which held-out tasks an evaluation plays, and what is to be known of them before it does."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron_fleet.data.near import near_duplicates
from megatron_fleet.data.split import key_hash
from megatron_fleet.data.task import Task

FEW_TASKS = 5
"""With fewer different tasks the pass rate of an environment says little of it."""


def choose(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """At most ``limit`` of ``tasks``, in their order: one of each environment by turns, those of the least hash first.

    ``None``: all of them.

    So neither the order of a file nor tasks that are added to it change much of the choice, it agrees with what
    ``data.max_eval_per_env`` keeps, and a larger limit gives a larger choice that includes it.
    """
    taken: defaultdict[str, int] = defaultdict(int)
    turns = []
    for index in sorted(range(len(tasks)), key=lambda i: key_hash(tasks[i].key)):
        env_key = tasks[index].env_key
        turns.append((taken[env_key], env_key, index))
        taken[env_key] += 1
    return [tasks[index] for index in sorted(index for _, _, index in sorted(turns)[:limit])]


def notes(chosen: Sequence[Task], held_out: Sequence[Task]) -> list[str]:
    """Sentences for the start of an evaluation of ``chosen``, which are of ``held_out``: tasks that are left out, and
    environments with fewer than ``FEW_TASKS`` different tasks, those of `data.near` counting once."""
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
