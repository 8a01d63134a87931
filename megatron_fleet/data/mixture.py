"""Prompts of a step per environment: weights, a minimum, and rounding to whole prompts. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import MixtureConfig
from megatron_fleet.data.task import Task

ROUNDING = 1e-9
"""Credits up to this count as 0, because sums of shares are not exact."""


def env_sizes(tasks: Iterable[Task]) -> dict[str, int]:
    """Map environment (``Task.env_key``), sorted by name → number of its tasks."""
    return dict(sorted(Counter(task.env_key for task in tasks).items()))


def env_shares(sizes: Mapping[str, int], mixture: MixtureConfig) -> dict[str, float]:
    """Map environment → its share of the prompts, above 0, sum 1; environments that get nothing are absent.

    proportional: n / Σn, n tasks. temperature: n^(1/T) / Σ n^(1/T) (Arivazhagan et al. 2019, arXiv:1907.05019 §4.2).
    uniform: 1 / environments. explicit: as configured.

    Args:
        sizes: environment → its training tasks.
    """
    if mixture.weights == "explicit":
        weights = {env: float(mixture.shares[env]) for env in sizes if mixture.shares[env] > 0}
    else:
        temperature = mixture.temperature if mixture.temperature is not None else 1.0
        exponent = {"proportional": 1.0, "temperature": 1.0 / temperature, "uniform": 0.0}[mixture.weights]
        weights = {env: float(size) ** exponent for env, size in sizes.items()}
    total = sum(weights.values())
    return {env: weight / total for env, weight in weights.items()}


def drawable(tasks: Iterable[Task], mixture: MixtureConfig) -> int:
    """Number of tasks that a mixture draws from: those of environments with a share."""
    sizes = env_sizes(tasks)
    return sum(sizes[env] for env in env_shares(sizes, mixture))


def check_mixture(tasks: Iterable[Task], batch: int, mixture: MixtureConfig) -> None:
    """Reject a mixture that does not fit the training tasks.

    Args:
        batch: prompts per step.

    Raises:
        UserError: explicit shares do not match the tasks' environments, or the minimum exceeds a step.
    """
    sizes = env_sizes(tasks)
    if mixture.weights == "explicit":
        _check_names(sizes, mixture)
    envs, least = len(env_shares(sizes, mixture)), mixture.min_per_env
    if envs * least > batch:
        raise UserError(
            f"data.mixture.min_per_env={least} for {envs} environments needs {envs * least} prompts a step, and "
            f"rollout.prompts_per_step={batch}; lower the first to at most {batch // envs} or raise the second."
        )


def _check_names(sizes: Mapping[str, int], mixture: MixtureConfig) -> None:
    for env in mixture.shares:
        if env not in sizes:
            raise UserError(
                f"data.mixture.shares names {env}, which has no training task; there are {', '.join(sorted(sizes))}."
            )
    missing = sorted(set(sizes) - set(mixture.shares))
    if missing:
        raise UserError(
            f"data.mixture.shares does not name {', '.join(missing)}; add a weight for each, 0 leaves it out."
        )
    if not any(mixture.shares[env] > 0 for env in sizes):
        raise UserError("data.mixture.shares leaves every environment out; give one a weight above 0.")


def with_minimum(shares: np.ndarray, least: float) -> np.ndarray:
    """Raise shares below ``least`` to it, reducing the others in proportion.

    Args:
        shares: float64 ``[K]``, above 0, sum 1.
        least: at most 1 / K.
    """
    raised = np.zeros(len(shares), dtype=bool)
    while True:
        free = shares[~raised].sum()
        out = np.where(raised, least, shares * ((1 - least * raised.sum()) / free if free else 0.0))
        below = ~raised & (out < least)
        if not below.any():
            return out
        raised |= below


def quotas(shares: np.ndarray, credit: np.ndarray, batch: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the whole prompts per environment for one step, and the credit left for the next.

    Every environment gets ``least``; the rest is assigned one at a time by the quota method of apportionment (Balinski
    and Young 1975, Amer. Math. Monthly 82:701-730): of the environments with credit above 0, to the one whose credit
    would reach 1 first. Credit is an environment's entitlement so far (Σ batch × share) minus what it got.

    Invariants: the credits sum to 0 and each is above −1, so no environment is ever a whole prompt ahead. With constant
    shares each is also below 1 (the method's theorem): what an environment got is its entitlement rounded down or up,
    at every step. With shares that change from step to step a credit is below K − 1, which follows from the first two.

    Args:
        shares: float64 ``[K]``, sum 1, each at least ``least / batch``.
        credit: float64 ``[K]`` of the previous call, zeros at first.

    Returns:
        int64 ``[K]`` with sum ``batch``, and float64 ``[K]``.
    """
    counts = np.full(len(shares), least, dtype=np.int64)
    remaining = batch - least * len(shares)
    if remaining == 0:
        return counts, credit
    rest = np.maximum(batch * shares - least, 0.0)
    rest /= rest.sum()
    credit = credit.copy()
    for _ in range(remaining):
        credit += rest
        until_due = (1.0 - credit) / np.maximum(rest, 1e-12)
        first = int(np.argmin(np.where(credit > ROUNDING, until_due, np.inf)))
        counts[first] += 1
        credit[first] -= 1.0
    return counts, credit
