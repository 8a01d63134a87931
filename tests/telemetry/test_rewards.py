"""Reward statistics against brute force and hand-counted prompts."""

import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.agents.trajectory import Group, Outcome, Trajectory
from megatron_fleet.telemetry.episodes import why_nothing_can_be_known, why_nothing_is_known
from megatron_fleet.telemetry.rewards import pass_at_k, reward_metrics


def group(*rewards: float | None) -> Group:
    none, false = np.zeros(0, np.int32), np.zeros(0, bool)
    return Group(
        0,
        "t",
        "e",
        [Trajectory("t", "e", 0, i, none, false, none, (), r, "", Outcome.COMPLETED) for i, r in enumerate(rewards)],
    )


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"n={n} c={c} k={k}"):
        pass_at_k(n, c, k)


def test_binary_rewards_by_hand():
    metrics = reward_metrics([group(1, 0, 0, 0), group(1, 1, 0, 0), group(0, 0, 0, 0)], 1.0)
    assert metrics == pytest.approx(
        {
            "avg_raw_reward": 3 / 12,
            "mean_clipped_reward": 3 / 12,
            "mean_positive_reward": 1,
            "avg_pass_at_1": 3 / 12,
            "avg_pass_at_4": 2 / 3,
            "pass_at_1": 3 / 12,
            "pass_at_2": (3 / 6 + 5 / 6 + 0) / 3,
            "pass_at_4": 2 / 3,
            "variance_per_prompt": (0.1875 + 0.25 + 0) / 3,
            "signal_ratio": 2 / 3,
        }
    )


def test_the_two_mean_positive_rewards_differ():
    metrics = reward_metrics([group(0.5, -1.0, 1.0, 0.0)], 1.0)
    assert metrics["mean_positive_reward"] == 0.75  # over the two positive ones
    assert metrics["mean_clipped_reward"] == 0.375  # over all four
    assert metrics["avg_raw_reward"] == 0.125


def test_a_part_of_the_reward_is_no_pass_below_the_threshold():
    groups = [group(0.5, 0.9, 1.0, 0.0), group(0.9, 0.5, 0.5, None)]
    strict, lenient = reward_metrics(groups, 1.0), reward_metrics(groups, 0.9)
    assert (strict["pass_at_1"], strict["pass_at_2"], strict["avg_pass_at_4"]) == (1 / 8, 1 / 4, 1 / 2)
    assert lenient["pass_at_1"] == pytest.approx((2 / 4 + 1 / 3) / 2) and lenient["avg_pass_at_4"] == 1
    solved = ("pass_at_", "avg_pass_at_")
    assert {n: v for n, v in strict.items() if not n.startswith(solved)} == {
        n: v for n, v in lenient.items() if not n.startswith(solved)
    }


@given(st.lists(st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5), min_size=1, max_size=6))
def test_the_primary_metric_is_the_mean_over_prompts_of_pass_at_1(rows):
    known = [[r for r in row if r is not None] for row in rows]
    shares = [sum(r >= 1 for r in row) / len(row) for row in known if row]
    metrics = reward_metrics([group(*row) for row in rows], 1.0)
    assert metrics.get("avg_pass_at_1") == (pytest.approx(np.mean(shares)) if shares else None)


def test_unknown_is_not_zero():
    metrics = reward_metrics([group(1, None, None), group(None, None, None), group(1, 0, float("nan"))], 1.0)
    assert metrics["avg_raw_reward"] == pytest.approx(2 / 3)
    assert metrics["pass_at_1"] == pytest.approx((1 + 0.5) / 2)
    assert metrics["pass_at_2"] == 1  # only the last prompt has two known rewards
    assert "pass_at_3" not in metrics
    assert metrics["avg_pass_at_3"] == 1
    assert metrics["variance_per_prompt"] == 0.25
    assert reward_metrics([group(None, None)], 1.0) == reward_metrics([], 1.0) == {}


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3), min_size=1, max_size=6))
def test_equal_groups_of_binary_rewards_agree(rows):
    metrics = reward_metrics([group(*row) for row in rows], 1.0)
    assert metrics["pass_at_1"] == pytest.approx(metrics["avg_raw_reward"])
    assert metrics["pass_at_3"] == pytest.approx(metrics["avg_pass_at_3"])
    assert metrics["pass_at_1"] <= metrics["pass_at_2"] <= metrics["pass_at_3"]


def test_rounding_is_no_signal():
    assert reward_metrics([group(0.1, 0.1, 0.1)], 1.0)["signal_ratio"] == 0


def test_a_step_without_any_known_reward_says_why():
    def why(*found: tuple[float | None, Outcome, str]) -> str | None:
        trajectories = group(*(reward for reward, _, _ in found)).trajectories
        for trajectory, (_, outcome, reason) in zip(trajectories, found, strict=True):
            trajectory.outcome, trajectory.reward_reason = outcome, reason
        return why_nothing_is_known(trajectories)

    failed = (None, Outcome.VERIFIER_FAILED, "no step gave a reward")
    lost = (None, Outcome.ENV_FAILED, "gone")
    assert why(lost, failed, failed) == "verifier_failed: no step gave a reward"
    assert why(failed, (0.0, Outcome.COMPLETED, "")) is None
    assert why() is None


@pytest.mark.parametrize(
    ("outcomes", "lengths", "said"),
    [
        (
            [(None, Outcome.PROMPT_TOO_LONG)] * 2,
            [1400, 1200],
            r"^every first prompt is longer than rollout\.max_"
            r"context=1024 \(the shortest has 1200 tokens\); raise it",
        ),
        ([(None, Outcome.PROMPT_TOO_LONG)], [], r"max_context=1024 \(reason\); raise it"),
        (
            [(None, Outcome.REFUSED), (None, Outcome.PROMPT_TOO_LONG)],
            [],
            "^no episode can be played, .* refused: reason;",
        ),
        ([(None, Outcome.REFUSED), (0.0, Outcome.COMPLETED)], [], None),
        ([(None, Outcome.REFUSED), (None, Outcome.ENV_FAILED)], [], None),
    ],
)
def test_only_what_no_attempt_can_change_ends_a_run(outcomes, lengths, said):
    trajectories = group(*(reward for reward, _ in outcomes)).trajectories
    for trajectory, (_, outcome) in zip(trajectories, outcomes, strict=True):
        trajectory.outcome, trajectory.reward_reason = outcome, "reason"
    for trajectory, length in zip(trajectories, lengths, strict=False):
        trajectory.metrics["first_prompt_tokens"] = length
    found = why_nothing_can_be_known(trajectories, 1024)
    assert found is None if said is None else re.search(said, found)
