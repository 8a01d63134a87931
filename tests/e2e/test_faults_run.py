"""A whole run on an embedded fleet that fails on purpose: all is accounted for, and what is unknown counts nowhere."""

import statistics

import numpy as np
import pytest
from whole_runs import Run

from megatron_fleet.telemetry.shards import Shard

pytestmark = pytest.mark.slow

FAULTS = (
    "run.steps=2",
    "eval=none",
    "rollout.max_retries=0",  # so that what is unknown stays to be seen
    "env.step_timeout_s=15",
    "env.faults.slow_rate=0.1",
    "env.faults.slow_s=0.5",
    "env.faults.hang_rate=0.15",
    "env.faults.malformed_rate=0.15",
    "env.faults.dead_session_rate=0.1",
    "env.faults.verifier_failure_rate=0.2",
)
FATES = ("trained", "filtered", "unknown", "too_few_known", "masked", "no_tokens")


def advantages(episodes):
    """Sizes of GRPO's advantages and action tokens of the trained episodes, from the known rewards on record alone."""
    groups = {}
    for episode in episodes:
        if episode["reward"] is not None:
            groups.setdefault(episode["group"], []).append(episode)
    sizes, tokens = [], []
    for known in groups.values():
        rewards = [episode["reward"] for episode in known]
        if len(set(rewards)) > 1:
            mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
            sizes += [abs(reward - mean) / spread for reward in rewards]
            tokens += [episode["action_tokens"] for episode in known]
    return sizes, tokens


def test_unknown_rewards_are_counted_and_enter_nothing(tmp_path):
    run = Run(tmp_path / "faults", FAULTS)
    run.finish()
    run.assert_nothing_left()
    unknown = 0
    for row in run.metrics():
        episodes = Shard.open(run.out / "trajectories" / f"step_{row['step']:06d}.parquet").records()
        known = [e["reward"] for e in episodes if e["reward"] is not None]
        lost = len(episodes) - len(known)
        unknown += lost
        assert sum(row[f"accounting/{fate}"] for fate in FATES) == row["accounting/episodes"] == len(episodes) == 16
        assert row["accounting/attempts_started"] == 16 + row["accounting/attempts_aborted"]
        assert row["accounting/unknown"] == lost
        assert row["generate/unknown_reward_rate"] == lost / 16
        assert row["reward/avg_raw_reward"] == pytest.approx(np.mean(known))
        failed = [e["outcome"] for e in episodes if e["reward"] is None]
        assert set(failed) <= {"env_failed", "verifier_failed", "timeout"}
        assert not any(e["reason"].startswith("internal error") for e in episodes)
        assert row["accounting/attempts_aborted"] == 0
        sizes, tokens = advantages(episodes)
        assert row["accounting/trained"] == len(sizes)
        if sizes:
            expected = np.average(sizes, weights=tokens)
            assert row["loss/avg_raw_advantages_abs"] == pytest.approx(expected, rel=1e-4)
            assert row["accounting/trained_tokens"] == sum(tokens)
    assert 3 <= unknown <= 28  # of 32; half are expected
