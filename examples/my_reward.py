"""A reward: `mfleet train env=python env.reward=my_reward:score data.tasks=…` (see README.md)."""

from __future__ import annotations

from megatron_fleet.data.task import Task


def score(text: str, task: Task) -> float:
    """Return 1 for the right answer alone, else 0.

    Args:
        text: what the policy answered, without its thinking.
        task: the row of the task file; the policy never sees its ``answer``.
    """
    return float(text.strip() == task.answer)
