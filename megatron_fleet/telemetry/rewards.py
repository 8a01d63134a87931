"""Reward metrics: means, pass@k, spread. Unknown rewards are excluded everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_fleet.algorithms.advantages import is_known

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Group


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate that at least one of k samples passes, from c passes in n ≥ k samples.

    1 − C(n−c, k) / C(n, k), in exact integers. Chen et al. 2021, arXiv:2107.03374 eq. 1.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n} c={c} k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def known_rewards(groups: Sequence[Group]) -> list[np.ndarray]:
    """Return the known rewards per prompt, float64 ``[K]`` each; prompts without any are omitted."""
    rows = ([t.reward for t in g.trajectories if is_known(t.reward)] for g in groups)
    return [np.array(row, dtype=np.float64) for row in rows if row]


def is_solved(reward: float, pass_threshold: float) -> bool:
    """Return whether this known reward counts as solved under ``eval.pass_threshold`` (Fleet's rule: 1)."""
    return reward >= pass_threshold


def reward_metrics(groups: Sequence[Group], pass_threshold: float) -> dict[str, float]:
    """Compute reward metrics without prefix; a mean over no values is absent."""
    prompts = known_rewards(groups)
    if not prompts:
        return {}
    rewards = np.concatenate(prompts)
    out = {
        "avg_raw_reward": float(rewards.mean()),
        "mean_clipped_reward": float(np.maximum(rewards, 0).mean()),
    }
    if (rewards > 0).any():
        out["mean_positive_reward"] = float(rewards[rewards > 0].mean())
    known_and_solved = [(len(p), sum(is_solved(reward, pass_threshold) for reward in p.tolist())) for p in prompts]
    samples = max(len(g.trajectories) for g in groups)
    return out | _pass_metrics(known_and_solved, samples) | _spread_metrics(prompts)


def _pass_metrics(prompts: Sequence[tuple[int, int]], n: int) -> dict[str, float]:
    """Compute pass@k. ``prompts``: number of known and of solved rewards of each; ``n``: samples per prompt."""
    out = {f"avg_pass_at_{n}": float(np.mean([solved > 0 for _, solved in prompts]))}
    for k in sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n}):
        values = [pass_at_k(known, solved, k) for known, solved in prompts if known >= k]
        if values:
            out[f"pass_at_{k}"] = float(np.mean(values))
    return out | {"avg_pass_at_1": out["pass_at_1"]}


def _spread_metrics(prompts: Sequence[np.ndarray]) -> dict[str, float]:
    several = [p for p in prompts if len(p) >= 2]
    if not several:
        return {}
    return {
        "variance_per_prompt": float(np.mean([p.var() for p in several])),
        # Not variance > 0: the variance of equal rewards such as 0.1 is a rounding error, not always 0.
        "signal_ratio": float(np.mean([p.min() != p.max() for p in several])),
    }
