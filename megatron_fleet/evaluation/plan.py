"""Which held-out tasks an evaluation plays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_fleet.data.split import key_hash
from megatron_fleet.data.task import Task


def choose(tasks: Sequence[Task], limit: int) -> list[Task]:
    """At most ``limit`` of ``tasks``, in their order: one of each environment by turns, those of the least hash first.

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
