"""Results per environment: pass rates before and after training with a status, and the learning signal in training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.run import Run
from megatron_fleet.analysis.statistics import Estimate, change, pass_rate

SATURATED, FAILING = 0.95, 0.05
MIN_TASKS = 5
"""With fewer paired tasks no change counts as improved or worse."""
ALL = "all"
FINE = "Fine."
FEW = 0.25
"""Below this share of steps (or prompts) with signal an environment teaches too little, by Fleet's rule."""
_ENV = re.compile(r"reward/([^/]+)/avg_raw_reward")


class Status(StrEnum):
    """Outcome of training for one environment; the first matching rule of ``RULES`` applies."""

    UNKNOWN = "unknown"
    IMPROVED = "improved"
    WORSE = "worse"
    SATURATED = "saturated"
    FAILING = "failing"
    UNCLEAR = "unclear"
    FLAT = "flat"


RULES: dict[Status, str] = {
    Status.UNKNOWN: "no known reward in the last evaluation",
    Status.IMPROVED: f"at least {MIN_TASKS} paired tasks, and the 95 % interval of the change lies above 0",
    Status.WORSE: f"at least {MIN_TASKS} paired tasks, and the 95 % interval of the change lies below 0",
    Status.SATURATED: f"pass@1 of the last evaluation is at least {SATURATED:.2f}",
    Status.FAILING: f"pass@1 of the last evaluation is at most {FAILING:.2f}",
    Status.UNCLEAR: f"fewer than {MIN_TASKS} tasks have known rewards in both evaluations",
    Status.FLAT: "none of these: the interval of the change holds 0",
}


@dataclass(frozen=True, slots=True)
class EnvironmentResult:
    """One environment (or ``all``). ``before`` and ``after`` are equal when there was only one evaluation."""

    env: str
    before: Estimate | None
    after: Estimate | None
    change: Estimate | None
    unknown: tuple[int, int]
    episodes: tuple[int, int]
    status: Status


def environment_results(run: Run, kind: str) -> list[EnvironmentResult]:
    """Return ``all`` first, then every environment by name; empty without an evaluation of this kind."""
    first, last = run.first_and_last(kind)
    before = run.episodes(kind, first)
    after = run.episodes(kind, last) if last is not None else before
    paired = last is not None
    envs = sorted({e.env for e in [*before, *after]})
    if not envs:
        return []
    rows = [_result(ALL, before, after, paired)]
    return rows + [_result(env, _of(before, env), _of(after, env), paired) for env in envs]


def status(after: Estimate | None, delta: Estimate | None) -> Status:
    """Return the status of the first matching rule of ``RULES``."""
    if after is None:
        return Status.UNKNOWN
    if delta is not None and delta.tasks >= MIN_TASKS:
        if delta.low is not None and delta.low > 0:
            return Status.IMPROVED
        if delta.high is not None and delta.high < 0:
            return Status.WORSE
    if after.value >= SATURATED:
        return Status.SATURATED
    if after.value <= FAILING:
        return Status.FAILING
    if delta is None or delta.tasks < MIN_TASKS:
        return Status.UNCLEAR
    return Status.FLAT


def _of(episodes: Sequence[Episode], env: str) -> list[Episode]:
    return [e for e in episodes if e.env == env]


def _result(env: str, before: Sequence[Episode], after: Sequence[Episode], paired: bool) -> EnvironmentResult:
    last = pass_rate(after)
    delta = change(before, after) if paired else None
    unknown = tuple(sum(e.solved is None for e in episodes) for episodes in (before, after))
    return EnvironmentResult(
        env=env,
        before=pass_rate(before),
        after=last,
        change=delta,
        unknown=(unknown[0], unknown[1]),
        episodes=(len(before), len(after)),
        status=status(last, delta),
    )


@dataclass(frozen=True, slots=True)
class Signal:
    """One environment over the training steps in which at least one of its prompts had two known rewards.

    Attributes:
        steps: number of those steps.
        reward: mean of ``reward/{env}/avg_raw_reward``.
        variance: mean of ``reward/{env}/variance_per_prompt``.
        steps_with_signal: share of the steps in which some prompt's rewards were not all equal.
        prompts_with_signal: mean of ``reward/{env}/signal_ratio``.
    """

    env: str
    steps: int
    reward: float
    variance: float
    steps_with_signal: float
    prompts_with_signal: float

    @property
    def advice(self) -> str:
        """Recommended action; the thresholds are ``FEW`` and a mean reward of one half."""
        easy = self.reward >= 0.5
        if self.steps_with_signal < FEW:
            if easy:
                return "Too easy: lower its weight, or give it harder tasks."
            return "Too hard: give it easier tasks or hints, or look for a broken environment or verifier."
        if self.prompts_with_signal < FEW:
            side = "always solved" if easy else "never solved"
            return f"Thin: most of its prompts are {side}; select tasks by difficulty, or take more samples."
        return FINE


def signals(rows: Sequence[Mapping[str, Any]]) -> list[Signal]:
    """Return the signal of every environment seen in training, by name. Unknown rewards are excluded."""
    envs = sorted({m[1] for row in rows for name in row if (m := _ENV.fullmatch(name))})
    return [signal for env in envs if (signal := _signal(env, rows))]


def _signal(env: str, rows: Sequence[Mapping[str, Any]]) -> Signal | None:
    names = [f"reward/{env}/{name}" for name in ("avg_raw_reward", "variance_per_prompt", "signal_ratio")]
    values = [[row[name] for name in names] for row in rows if all(row.get(name) is not None for name in names)]
    if not values:
        return None
    table = np.array(values, dtype=np.float64)
    reward, variance, ratio = table.mean(axis=0)
    return Signal(env, len(table), float(reward), float(variance), float((table[:, 2] > 0).mean()), float(ratio))
