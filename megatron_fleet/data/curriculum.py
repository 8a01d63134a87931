"""Curriculum: estimates of the learning signal from known rewards, and the weights derived from them.

A group whose known rewards are all equal has advantage 0 everywhere, so it teaches nothing; DAPO (arXiv:2503.14476
§3.2) drops such groups after playing them. Here later batches ask for fewer of them: as in SEC (arXiv:2505.14970) the
categories are the arms of a bandit that changes while the policy learns, estimated with exponential forgetting, but the
measure is the share of groups with a signal rather than the mean absolute advantage, because division by the group's
standard deviation makes the latter depend on the configured advantage. A floor replaces SEC's softmax: an environment
that looks saturated or dead is still measured, so that it comes back when the policy has forgotten it or improved
enough to learn from it.

Callers exclude unknown rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_KNOWN = 2
"""Known rewards that a group needs for its signal to be measurable."""


@dataclass(frozen=True, slots=True)
class SignalEstimate:
    """Running estimate for one environment.

    Attributes:
        signal: share of groups whose known rewards are not all equal, in [0, 1].
        reward: mean known reward, which distinguishes saturated from dead; ``None`` before the first measurement.
        groups: number of measurements so far.
    """

    signal: float
    reward: float | None = None
    groups: int = 0


def measurable(rewards: Sequence[float]) -> bool:
    """Return whether a group has enough known rewards to measure its signal."""
    return len(rewards) >= MIN_KNOWN


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the known rewards of a group differ."""
    return measurable(rewards) and min(rewards) != max(rewards)


def measured(estimate: SignalEstimate, rewards: Sequence[float], half_life: float) -> SignalEstimate:
    """Return the estimate after one more group with these known rewards.

    ``s ← s + α (x − s)`` with x = 1 when the group has a signal and 0 otherwise, α = 1 − 2^(−1 / half_life); the same
    for the mean reward. A group that is not measurable changes nothing.
    """
    if not measurable(rewards):
        return estimate
    alpha = 1.0 - 2.0 ** (-1.0 / half_life)
    mean = sum(rewards) / len(rewards)
    before = mean if estimate.reward is None else estimate.reward
    return SignalEstimate(
        signal=estimate.signal + alpha * (float(has_signal(rewards)) - estimate.signal),
        reward=before + alpha * (mean - before),
        groups=estimate.groups + 1,
    )


def signal_weights(shares: Mapping[str, float], signals: Mapping[str, float], floor: float) -> dict[str, float]:
    """Return shares times ``floor + (1 − floor) · signal / largest signal``, scaled to sum 1.

    The factor is at most 1, so every share stays at least ``floor`` × its old value. When no environment has a signal
    the shares are unchanged.
    """
    largest = max(signals[env] for env in shares)
    if largest <= 0:
        return dict(shares)
    weights = {env: share * (floor + (1 - floor) * signals[env] / largest) for env, share in shares.items()}
    total = sum(weights.values())
    return {env: weight / total for env, weight in weights.items()}


def streak_after(streak: int, rewards: Sequence[float]) -> int:
    """Return a task's number of consecutive groups without signal; unchanged if this group is not measurable."""
    if not measurable(rewards):
        return streak
    return 0 if has_signal(rewards) else streak + 1
