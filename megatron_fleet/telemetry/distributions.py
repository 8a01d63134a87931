"""Histogram data per step: distributions of quantities over episodes, prompts or trained sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_fleet.telemetry.episodes import response_tokens, trajectories_of
from megatron_fleet.telemetry.rewards import known_rewards

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron_fleet.agents.trajectory import Group
    from megatron_fleet.algorithms.batch import Batch

DISTRIBUTIONS = {
    "distribution/response_tokens": "Tokens of each episode but those of prompts, observations included.",
    "distribution/turns": "Turns of each episode.",
    "distribution/tool_calls": "Tool calls of each episode.",
    "distribution/episode_s": "Seconds of each episode, verification included.",
    "distribution/prompt_reward": "Mean known reward of each prompt.",
    "distribution/advantage": "Advantage of each trained sequence.",
    "distribution/staleness": "Weight versions since each span of tokens was sampled.",
}


def distributions(
    groups: Sequence[Group], batch: Batch, staleness: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return finite values by name, float64 ``[N]``, N ≥ 1; names without values are absent."""
    episodes = trajectories_of(groups)
    values = {
        "response_tokens": [response_tokens(t) for t in episodes],
        "turns": [t.metrics["turns"] for t in episodes if "turns" in t.metrics],
        "tool_calls": [t.metrics["tool_calls"] for t in episodes if "tool_calls" in t.metrics],
        "episode_s": [t.metrics["seconds"] for t in episodes if "seconds" in t.metrics],
        "prompt_reward": [rewards.mean() for rewards in known_rewards(groups)],
        "advantage": batch.advantages,
        "staleness": staleness,
    }
    arrays = {f"distribution/{name}": np.array(own, dtype=np.float64) for name, own in values.items()}
    return {name: finite for name, own in arrays.items() if len(finite := own[np.isfinite(own)])}
