"""Pass rates with bootstrap intervals, and how a report formats numbers.

Tasks are resampled, not episodes: samples of one task are not independent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_fleet.analysis.episodes import Episode

NOTHING = "–"
"""Cell of a value that does not exist."""
RESAMPLES = 2000
LEVEL = 0.95
_CHUNK = 200
"""Resamples drawn at once; bounds memory at ``_CHUNK`` × tasks."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over tasks and its interval; ``low`` and ``high`` are ``None`` with fewer than two tasks."""

    value: float
    low: float | None
    high: float | None
    tasks: int


def bootstrap_mean(values: np.ndarray) -> tuple[float, float] | None:
    """Return the percentile interval of the mean at ``LEVEL``; ``None`` for fewer than two values. The seed is fixed.

    Efron and Tibshirani 1993, An Introduction to the Bootstrap, §13.3.

    Args:
        values: float64 ``[N]``, one per task.
    """
    n = len(values)
    if n < 2:
        return None
    rng = np.random.default_rng(0)
    means = np.concatenate([values[rng.integers(n, size=(_CHUNK, n))].mean(axis=1) for _ in range(RESAMPLES // _CHUNK)])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def task_rates(episodes: Iterable[Episode]) -> dict[str, float]:
    """Map task → share of its episodes with a known reward that are solved; tasks without a known one are omitted."""
    solved: defaultdict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        if episode.solved is not None:
            solved[episode.task].append(episode.solved)
    return {task: sum(results) / len(results) for task, results in solved.items()}


def pass_rate(episodes: Iterable[Episode]) -> Estimate | None:
    """Return pass@1, the mean over tasks of the share solved. ``None`` when no reward is known."""
    return _estimate(task_rates(episodes))


def change(before: Iterable[Episode], after: Iterable[Episode]) -> Estimate | None:
    """Return pass@1 after minus before, over the tasks that have known rewards in both (paired by task)."""
    first, last = task_rates(before), task_rates(after)
    return _estimate({task: last[task] - rate for task, rate in first.items() if task in last})


def _estimate(rates: Mapping[str, float]) -> Estimate | None:
    if not rates:
        return None
    values = np.array([rates[task] for task in sorted(rates)], dtype=np.float64)
    low, high = bootstrap_mean(values) or (None, None)
    return Estimate(float(values.mean()), low, high, len(values))


def rate(estimate: Estimate | None, *, signed: bool = False) -> str:
    """Format as ``0.455 [0.391, 0.520]``; without the interval if there is none."""
    if estimate is None:
        return NOTHING
    form = "+.3f" if signed else ".3f"
    if estimate.low is None or estimate.high is None:
        return _fixed(estimate.value, form)
    return f"{_fixed(estimate.value, form)} [{_fixed(estimate.low, form)}, {_fixed(estimate.high, form)}]"


def value(estimate: Estimate | None, *, signed: bool = False) -> str:
    return NOTHING if estimate is None else _fixed(estimate.value, "+.3f" if signed else ".3f")


def interval(estimate: Estimate | None) -> str:
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"[{_fixed(estimate.low, '.3f')}, {_fixed(estimate.high, '.3f')}]"


def _fixed(number: float, form: str) -> str:
    """Round to three decimals, without ``-0.000`` for values that round to 0."""
    return format(round(number, 3) + 0.0, form)


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def number(amount: float | None) -> str:
    """Format with thousands separators; one decimal below 100."""
    if amount is None:
        return NOTHING
    return f"{amount:,.0f}" if amount >= 100 or float(amount).is_integer() else f"{amount:.1f}"
