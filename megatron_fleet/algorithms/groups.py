"""Reward shaping and group filtering, selected by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_fleet.algorithms.advantages import has_signal, is_known
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import Interface, load
from megatron_fleet.config.schema import AlgorithmConfig

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group


class RewardShaping(Protocol):
    def __call__(self, group: Group, algorithm: AlgorithmConfig, /) -> Sequence[float | None]:
        """Return the rewards of which advantages are made, one per trajectory; those of unknown ones are ignored."""
        ...


class GroupFilter(Protocol):
    def __call__(self, group: Group, rewards: Sequence[float | None], /) -> bool:
        """Return whether a group is trained on. ``rewards``: shaped, one per trajectory; unknown ones are ``None``."""
        ...


OWN_SHAPING = Interface("algorithm.reward_shaping", "reward shaping", RewardShaping, "controller")
OWN_FILTER = Interface("algorithm.group_filter", "group filter", GroupFilter, "controller")


def unshaped(group: Group, algorithm: AlgorithmConfig) -> list[float | None]:
    """Return the rewards unchanged."""
    return [t.reward for t in group.trajectories]


def overlong(group: Group, algorithm: AlgorithmConfig) -> list[float | None]:
    """Reward minus a penalty that grows from 0, at ``limit`` − ``buffer`` sampled tokens, to ``penalty`` at ``limit``.

    Soft overlong punishment, DAPO, arXiv:2503.14476 eq. 13.
    """
    limit, buffer, penalty = algorithm.overlong.limit, algorithm.overlong.buffer, algorithm.overlong.penalty
    assert limit is not None, "a rule of the configuration asks for it"

    def shaped(reward: float | None, tokens: int) -> float | None:
        share = min(max(0.0, (tokens - (limit - buffer)) / buffer), 1.0)
        return None if reward is None else reward - penalty * share

    return [shaped(t.reward, int(np.count_nonzero(t.action_mask))) for t in group.trajectories]


def with_signal(group: Group, rewards: Sequence[float | None]) -> bool:
    """Keep groups whose known rewards differ: all others have advantages of 0. DAPO, arXiv:2503.14476 §3.2."""
    return has_signal(rewards)


def every_group(group: Group, rewards: Sequence[float | None]) -> bool:
    """Keep all groups; those without signal have advantages of 0 and count in the normaliser."""
    return True


SHAPINGS: dict[str, RewardShaping] = {"none": unshaped, "overlong": overlong}
FILTERS: dict[str, GroupFilter] = {"with_signal": with_signal, "none": every_group}


def shaped_rewards(group: Group, algorithm: AlgorithmConfig) -> list[float | None]:
    """Shaped rewards of ``group``, aligned with its trajectories; ``None`` where a reward is unknown.

    Raises:
        UserError: the shaping is neither built in nor loadable, or does not return a finite number for each known
            reward.
    """
    name = algorithm.reward_shaping
    given = (SHAPINGS.get(name) or load(OWN_SHAPING, name))(group, algorithm)
    known = [is_known(t.reward) for t in group.trajectories]
    try:
        values = [float(value) if own else None for value, own in zip(given, known, strict=True)]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        values = [None] * len(known)
    if [is_known(value) for value in values] != known:
        raise UserError(
            f"algorithm.reward_shaping={name} returned {str(given)[:200]} for the rewards "
            f"{str([t.reward for t in group.trajectories])[:200]}; it must return a finite number for each known one."
        )
    return values


def keeps_group(group: Group, rewards: Sequence[float | None], algorithm: AlgorithmConfig) -> bool:
    """Return whether ``algorithm.group_filter`` keeps ``group``.

    Raises:
        UserError: the filter is neither built in nor loadable, or does not return a truth value.
    """
    name = algorithm.group_filter
    kept = (FILTERS.get(name) or load(OWN_FILTER, name))(group, rewards)
    if not isinstance(kept, bool | np.bool_):
        raise UserError(f"algorithm.group_filter={name} returned {kept!r:.200}; it must return True or False.")
    return bool(kept)
