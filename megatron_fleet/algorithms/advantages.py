"""Advantages of one group from its known rewards: pure numpy, selected by name.

An unknown reward (``None`` or a non-finite number) enters no statistic and gets no advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeGuard

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import Interface, load

STD_EPS = 1e-6
MIN_KNOWN = 2
"""A group with fewer known rewards has nothing to compare and is left out."""


class AdvantageEstimator(Protocol):
    def __call__(self, rewards: np.ndarray, /) -> np.ndarray:
        """Return the advantages, float64 ``[K]``, of the known rewards of one group, float64 ``[K]`` with K ≥ 2."""
        ...


OWN_ADVANTAGE = Interface("algorithm.advantage", "advantage estimator", AdvantageEstimator, "controller")


def is_known(reward: float | None) -> TypeGuard[float]:
    """True when the reward is usable: a finite number."""
    return reward is not None and math.isfinite(reward)


def has_signal(rewards: Sequence[float | None]) -> bool:
    """True when at least two known rewards differ; otherwise every advantage is 0."""
    known = [r for r in rewards if is_known(r)]
    return len(known) >= MIN_KNOWN and min(known) != max(known)


def _centred(rewards: np.ndarray) -> np.ndarray:
    # Shifting by one element first makes equal rewards give exact zeros: a mean of 0.1s is not exactly 0.1, and the
    # division by a standard deviation of rounding noise would blow that up.
    shifted = rewards - rewards[0]
    return shifted - shifted.mean()


def grpo(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i − mean r) / (std r + 1e-6), unbiased std. GRPO, Shao et al. 2024, arXiv:2402.03300 §4.1.2."""
    return _centred(rewards) / (rewards.std(ddof=1) + STD_EPS)


def grpo_no_std(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i − mean r. Dr. GRPO, Liu et al. 2025, arXiv:2503.20783 §3.2: dividing by std favours easy/hard tasks."""
    return _centred(rewards)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i − mean_{j≠i} r_j. RLOO, Ahmadian et al. 2024, arXiv:2402.14740 §3.2."""
    n = len(rewards)
    return _centred(rewards) * (n / (n - 1))  # r_i − (S − r_i)/(n−1) = n/(n−1) · (r_i − S/n)


ADVANTAGES: dict[str, AdvantageEstimator] = {"grpo": grpo, "grpo_no_std": grpo_no_std, "leave_one_out": leave_one_out}


def group_advantages(rewards: Sequence[float | None], name: str) -> list[float | None] | None:
    """Advantages aligned with ``rewards``; ``None`` where the reward is unknown.

    Returns ``None`` for the whole group when fewer than two rewards are known.

    Raises:
        UserError: ``name`` is neither built in nor loadable, or its function does not return valid advantages.
    """
    advantage = ADVANTAGES.get(name) or load(OWN_ADVANTAGE, name)
    known = [i for i, r in enumerate(rewards) if is_known(r)]
    if len(known) < MIN_KNOWN:
        return None
    values = np.asarray(advantage(np.array([rewards[i] for i in known], dtype=np.float64)))
    if values.shape != (len(known),) or not np.isfinite(values).all():
        raise UserError(
            f"algorithm.advantage={name} returned {str(values)[:200]} for {len(known)} rewards; it must return as many "
            f"finite numbers."
        )
    result: list[float | None] = [None] * len(rewards)
    for i, value in zip(known, values, strict=True):
        result[i] = float(value)
    return result
