"""A group filter of your own: `mfleet train algorithm.group_filter=my_group_filter:not_too_easy` (see README.md)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fleet.agents.trajectory import Group

MOST = 0.9


def not_too_easy(group: Group, rewards: Sequence[float | None]) -> bool:
    """Learn from a group whose rewards differ and of which at most nine in ten episodes have the best one.

    Args:
        group: the episodes of one task, at least two of them with a known reward.
        rewards: after algorithm.reward_shaping, one per trajectory; `None` = unknown.

    Returns:
        Whether the group is learnt from.
    """
    known = [reward for reward in rewards if reward is not None]
    best = sum(reward == max(known) for reward in known)
    return min(known) != max(known) and best <= MOST * len(known)
