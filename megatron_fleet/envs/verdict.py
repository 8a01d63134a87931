"""Computation of an episode's reward from the environment's replies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from megatron_fleet.envs.base import Reward
from megatron_fleet.envs.content import known_number, score_of


def verdict(
    source: Literal["finish", "last", "sum"], given: Sequence[Any], last: Any, scored: bool, unfinished: float | None
) -> Reward:
    """Return the episode's reward: the environment's, or ``unfinished`` if the policy stopped early; else unknown.

    Args:
        source: origin of the reward, see ``env.openenv.reward``.
        given: reward of every step, in order; ``None`` for a step without one.
        last: the step that ended or scored the episode, ``None`` when there was none.
        scored: ``last`` is the reply of a scoring tool, whose result may then hold the score.
        unfinished: reward of a policy that did nothing, or stopped before the end.
    """
    if not given and last is None:
        return Reward(unfinished, "the policy did not act")
    if source != "finish" and not scored:
        known = [value for value in map(known_number, given) if value is not None]
        if not known:
            return Reward(None, "no step gave a reward")
        return Reward(known[-1] if source == "last" else math.fsum(known), f"{source} of {len(known)} rewards")
    if last is None:
        return Reward(unfinished, "the policy stopped before the environment ended the episode")
    result = last.observation.get("result")
    value = known_number(last.reward)
    if value is None and scored:
        value = score_of(result)
    reason = str(result.get("reason", "")) if isinstance(result, dict) else ""
    return Reward(value, reason or ("" if value is not None else "the environment gave no reward"))
