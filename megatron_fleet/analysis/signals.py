"""Learning signal per environment: reward variance within a prompt's group, over the training steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FINE = "Fine."
FEW = 0.25
"""Below this share of steps (or prompts) with signal an environment teaches too little, by Fleet's rule."""
_ENV = re.compile(r"reward/([^/]+)/avg_raw_reward")


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
