"""A reward shaping of your own: `mfleet train algorithm.reward_shaping=my_reward_shaping:per_turn` (see README.md)."""

from __future__ import annotations

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.config.schema import AlgorithmConfig

PENALTY = 0.02


def per_turn(group: Group, algorithm: AlgorithmConfig) -> list[float | None]:
    """Each turn beyond the first costs 0.02.

    Args:
        group: the episodes of one task; `Group.trajectories` have their rewards, outcomes, tokens and metrics.
        algorithm: the section of the configuration.

    Returns:
        One reward per trajectory; where it is unknown (`None`) nothing is looked at.
    """

    def turns(spans: tuple) -> int:
        return len({span.turn for span in spans if span.kind == "action"})

    return [None if t.reward is None else t.reward - PENALTY * max(0, turns(t.spans) - 1) for t in group.trajectories]
