"""Curves of a report, built from the rows of a metrics log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_fleet.analysis.document import Chart, Series
from megatron_fleet.analysis.run import resumed_at

MAX_POINTS = 400
MAX_LINES = 8
"""A chart with more lines (environments) is unreadable; those with the most points, then with the largest change from
first to last value, are kept, and the title says so."""
ENV = "{env}"
_SPARSE = "eval/"

# Title, whether the values are shares, metric name → label; `{env}` in a name stands for one line per environment.
CHARTS: tuple[tuple[str, bool, Mapping[str, str]], ...] = (
    (
        "Reward and pass@1",
        True,
        {
            "reward/avg_raw_reward": "training reward",
            "eval/all/pass_at_1": "evaluation, training temperature",
            "eval/all/greedy_pass_at_1": "evaluation, greedy",
        },
    ),
    ("Evaluation pass@1 per environment", True, {"eval/{env}/pass_at_1": ENV}),
    ("Training reward per environment", True, {"reward/{env}/avg_raw_reward": ENV}),
    ("Prompts with signal", True, {"reward/signal_ratio": "all", "reward/{env}/signal_ratio": ENV}),
    ("Policy entropy (nats)", False, {"policy/policy_entropy": "entropy"}),
    (
        "KL divergence (nats)",
        False,
        {"policy/policy_kl": "policy from reference", "policy/mismatch_kl": "engine from trainer"},
    ),
    ("Gradient norm", False, {"policy/grad_norm": "before clipping"}),
    ("Clipped tokens", False, {"policy/ppo_clip_ratio": "share of trained tokens"}),
    ("Generated tokens per second", False, {"generate/tokens_per_second": "tokens/s"}),
    (
        "Seconds per step",
        False,
        {
            "timing/step": "step",
            "timing/generate": "generate",
            "timing/policy_train": "train",
            "timing/sync_weights": "sync",
        },
    ),
    (
        "Failures (share of episodes)",
        False,
        {
            "generate/infrastructure_failure_rate": "infrastructure",
            "generate/verifier_unknown_rate": "verifier",
            "generate/unknown_reward_rate": "reward unknown",
            "environment/no_action_rate": "no action",
        },
    ),
    (
        "Errors and repetition",
        False,
        {
            "environment/tool_error_rate": "tool errors / calls",
            "environment/repeated_call_rate": "repeated calls / calls",
            "environment/parse_error_rate": "unreadable calls / turns",
        },
    ),
    (
        "Turns and tool calls per episode",
        False,
        {"environment/avg_turns": "turns", "environment/avg_tool_calls": "tool calls"},
    ),
    (
        "Tokens per episode",
        False,
        {"generate/avg_tokens_non_zero_rewards": "reward other than 0", "generate/avg_tokens_zero_rewards": "reward 0"},
    ),
    ("Environment mix (share of prompts)", True, {"data/mix/{env}": ENV}),
)


def charts(rows: Sequence[dict[str, Any]]) -> tuple[Chart, ...]:
    """Return the charts that have at least one value."""
    marks = tuple(resumed_at(rows))
    names = sorted({name for row in rows for name in row})
    found = []
    for title, share, lines in CHARTS:
        series = [s for pattern, label in lines.items() for s in _lines(rows, names, pattern, label)]
        if series:
            kept = _largest(series)
            said = title if len(kept) == len(series) else f"{title}: {len(kept)} of {len(series)} lines"
            found.append(Chart(said, tuple(kept), share and _within_one(kept), marks))
    return tuple(found)


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> tuple[tuple[float, float], ...]:
    """Reduce to at most ``limit`` points by averaging consecutive ones."""
    if len(points) <= limit:
        return tuple(points)
    parts = np.array_split(np.array(points, dtype=np.float64), limit)
    return tuple((float(step), float(value)) for step, value in (part.mean(axis=0) for part in parts))


def _lines(rows: Sequence[Mapping[str, Any]], names: Sequence[str], pattern: str, label: str) -> list[Series]:
    regex = re.compile(re.escape(pattern).replace(re.escape(ENV), "([^/]+)"))
    found = []
    for match in filter(None, map(regex.fullmatch, names)):
        env = match[1] if ENV in pattern else ""
        points = [(float(row["step"]), float(row[match[0]])) for row in rows if row.get(match[0]) is not None]
        if points and env != "all":
            found.append(Series(label.replace(ENV, env), thin(points), pattern.startswith(_SPARSE)))
    return found


def _largest(series: list[Series]) -> list[Series]:
    kept = sorted(series, key=lambda s: (-len(s.points), -abs(s.points[-1][1] - s.points[0][1])))[:MAX_LINES]
    return [s for s in series if s in kept]


def _within_one(series: Sequence[Series]) -> bool:
    return all(0 <= value <= 1 for s in series for _, value in s.points)
