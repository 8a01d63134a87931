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
    if len(values) < 2:
        return None
    return _percentiles(_resampled_means(values, np.random.default_rng(0)))


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


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of one run minus that of another; ``paired``: over the tasks that both know, else over all of each."""

    estimate: Estimate
    paired: bool


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> Difference | None:
    """Return ``other`` minus ``one``, two maps from task to value, with the bootstrap interval of the mean.

    Over shared tasks, if there are any: differences of single tasks are resampled (paired), so what is hard for both
    does not widen the interval. Else the tasks of each are resampled by themselves (Efron and Tibshirani 1993, §8.3,
    the two-sample problem) and ``tasks`` is the smaller number. ``None``: one of them is empty.
    """
    shared = sorted(one.keys() & other.keys())
    if shared:
        estimate = _estimate({task: other[task] - one[task] for task in shared})
        return None if estimate is None else Difference(estimate, True)
    if not one or not other:
        return None
    values = [np.array([own[task] for task in sorted(own)], dtype=np.float64) for own in (one, other)]
    value = float(values[1].mean() - values[0].mean())
    tasks = min(map(len, values))
    if tasks < 2:
        return Difference(Estimate(value, None, None, tasks), False)
    rng = np.random.default_rng(0)
    first, second = (_resampled_means(own, rng) for own in values)
    low, high = _percentiles(second - first)
    return Difference(Estimate(value, low, high, tasks), False)


def _resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the means of ``RESAMPLES`` resamples, float64 ``[RESAMPLES]``."""
    n = len(values)
    return np.concatenate([values[rng.integers(n, size=(_CHUNK, n))].mean(axis=1) for _ in range(RESAMPLES // _CHUNK)])


def _percentiles(means: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


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
