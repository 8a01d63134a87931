"""A step and an evaluation with every kind of episode: values by hand, every name registered, the docs up to date."""

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from megatron_fleet.agents.trajectory import Group, Outcome, Span, Trajectory
from megatron_fleet.algorithms.batch import build_data
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.telemetry import registry
from megatron_fleet.telemetry.episodes import NGRAM, eval_metrics, repeated_ngrams
from megatron_fleet.telemetry.metrics import (
    DISTRIBUTIONS,
    async_metrics,
    attempt_metrics,
    distributions,
    policy_metrics,
    progress_metrics,
    provisioning_metrics,
    step_metrics,
)
from megatron_fleet.trainer.base import LossReport, OptimReport

ATTEMPTS = {
    "started": 11,
    "known": 6,
    "unknown": 2,
    "retried": 2,
    "aborted": 1,
    "unstarted": 3,
    "stale": 4,
    "unfinished": 5,
    "replaced": 7,
}
ELSEWHERE = (
    *("checkpoint/", "data/", "engine/", "timing/loop_lag", "timing/start_limit", "timing/provision_s"),
    *("environment/{env}/breaker_open", "tokens/", "cost/"),
)
"""Names that tests/loop/test_resume.py, test_data_metrics.py, tests/rollout/test_engine_statistics.py,
tests/hosted/test_hosted_spending.py and `test_provisioning_metrics_by_hand` check."""
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def episode(env, group, sample, reward, outcome, turns, calls=0, errors=0, parse=0, version=3) -> Trajectory:
    """4 prompt tokens, then per turn 3 action tokens and 2 observation tokens."""
    spans, end = [Span("prompt", 0, 4, 0)], 4
    for turn in range(turns):
        spans += [Span("action", end, end + 3, turn, version), Span("observation", end + 3, end + 5, turn)]
        end += 5
    mask = np.zeros(end, bool)
    for span in spans:
        mask[span.start : span.end] = span.kind == "action"
    numbers = {"turns": turns, "tool_calls": calls, "tool_errors": errors, "parse_errors": parse}
    numbers |= {"no_action_turns": int(turns == 4) * 4, "repeated_calls": int(calls == 5) * 3}
    numbers |= {"max_repeat": 4, "think_tokens": 2} if calls == 5 else {"seconds": 4.0}
    numbers |= {"local_tool_calls": 2, "truncated_outputs": 1} if errors else {}
    tokens, logprobs = np.arange(end, dtype=np.int32), np.where(mask, -1.0, 0).astype(np.float32)
    return Trajectory(
        f"task{group}", env, group, sample, tokens, mask, logprobs, tuple(spans), reward, "", outcome, metrics=numbers
    )


def step_groups() -> list[Group]:
    rows = [
        ("shop", [(1.0, Outcome.COMPLETED, 2, 3, 1, 0, 4), (0.0, Outcome.MAX_TURNS, 4, 5, 1, 2)]),
        ("shop", [(0.0, Outcome.NO_ACTION, 1, 0, 0, 1), (None, Outcome.VERIFIER_FAILED, 1)]),
        ("a/b", [(None, Outcome.ENV_FAILED, 0), (1.0, Outcome.TIMEOUT, 2, 2)]),
        ("a/b", [(1.0, Outcome.COMPLETED, 1, 1), (1.0, Outcome.COMPLETED, 1, 1)]),
    ]
    return [
        Group(g, f"task{g}", env, [episode(env, g, s, *fields) for s, fields in enumerate(episodes)])
        for g, (env, episodes) in enumerate(rows)
    ]


def report(tokens: float, **sums: float) -> LossReport:
    names = (
        "entropy",
        "policy_loss",
        "kl_loss",
        "kl",
        "kl_clamped",
        "ratio",
        "clipped_low",
        "clipped_high",
        "clipped_dual",
    )
    mismatch = ("mismatch_unknown", "mismatch_k1", "mismatch_k3", "mismatch_excess", "mismatch_excess_squared")
    metrics = {"tokens": tokens, **dict.fromkeys((*names, *mismatch), 0.0), **sums}
    return LossReport(loss=0.5, metrics=metrics, tokens=48, padded_tokens=16)


def one_step(**changes) -> dict[str, float]:
    groups = step_groups()
    arguments = {
        "batch": build_data(groups, AlgorithmConfig(advantage="grpo_no_std")),
        "reports": [report(18.0, entropy=9.0)],
        "optims": [OptimReport(grad_norm=2.0, lr=1e-3, skipped=False)],
        "seconds": {"generate": 2.0, "step": 3.0},
        "weight_version": 5,
        "pass_threshold": 1.0,
    }
    return step_metrics(groups, **(arguments | changes))


def test_values_by_hand():
    expected = {
        "reward/avg_raw_reward": 4 / 6,
        "reward/shop/avg_raw_reward": 1 / 3,
        "reward/a_b/pass_at_2": 1.0,
        "reward/signal_ratio": 1 / 2,
        "environment/total_episodes": 8,
        "environment/total_env_init_failed": 1,
        "environment/avg_turns": 12 / 8,
        "environment/shop/max_turns": 4,
        "environment/a_b/min_turns": 0,
        "environment/tool_calls_per_turn": 12 / 12,
        "environment/tool_error_rate": 2 / 12,
        "environment/shop/tool_error_rate": 2 / 8,
        "environment/parse_error_rate": 3 / 12,
        "environment/no_action_rate": 1 / 8,
        "environment/no_action_turn_rate": 4 / 12,
        "environment/repeated_call_rate": 3 / 12,
        "environment/repeating_rate": 1 / 8,
        "environment/max_repeat": 4,
        "environment/a_b/max_repeat": 0,
        "environment/think_token_share": 2 / 36,
        "environment/shop/think_token_share": 2 / 24,
        "environment/avg_local_tool_calls": 4 / 8,
        "environment/avg_truncated_outputs": 2 / 8,
        "environment/false_completion_rate": 0,
        "environment/a_b/outcome/timeout": 1,
        "environment/a_b/trajectory_timeouts": 1,
        "environment/shop/trajectory_timeouts": 0,
        "environment/a_b/infrastructure_failure_rate": 1 / 4,
        "environment/shop/verifier_unknown_rate": 1 / 4,
        "timing/episode_s/shop": 3,
        "timing/min_episode_s/all": 0,
        "timing/episode_s/all": 28 / 8,
        "generate/avg_tokens/completed": (10 + 5 + 5) / 3,
        "generate/avg_tokens/max_turns": 20,
        "generate/outcome/completed": 3,
        "generate/infrastructure_failure_rate": 1 / 8,
        "generate/verifier_unknown_rate": 1 / 8,
        "generate/unknown_reward_rate": 2 / 8,
        "generate/trajectory_timeouts": 1,
        "generate/action_tokens": 36,
        "generate/tokens_per_second": 18,
        "generate/min_num_tokens": 0,
        "generate/max_num_tokens": 20,
        "generate/avg_num_tokens": 60 / 8,
        "generate/std_num_tokens": math.sqrt((10**2 + 20**2 + 5**2 * 4 + 10**2) / 8 - 7.5**2),
        "generate/avg_tokens_non_zero_rewards": (10 + 10 + 5 + 5) / 4,
        "generate/avg_tokens_zero_rewards": (20 + 5) / 2,
        "generate/weight_version_min": 3,
        "generate/weight_version_max": 4,
        "accounting/episodes": 8,
        "accounting/trained": 2,
        "accounting/filtered": 2,
        "accounting/unknown": 2,
        "accounting/too_few_known": 2,
        "accounting/no_tokens": 0,
        "accounting/trained_tokens": 18,
        "loss/avg_final_rewards": 0.5,
        "loss/avg_raw_advantages": (6 * 0.5 - 12 * 0.5) / 18,
        "loss/avg_raw_advantages_abs": 0.5,
        "policy/response_length": 9,
        "policy/policy_entropy": 0.5,
        "policy/packing_efficiency": 0.75,
        "policy/weight_version": 5,
        "timing/generate": 2.0,
    }
    metrics = one_step()
    assert {name: metrics.get(name) for name in expected} == pytest.approx(expected)


def test_outcomes_and_fates_both_add_up_to_the_episodes():
    metrics = one_step()
    outcomes = [v for k, v in metrics.items() if k.startswith("generate/outcome/")]
    assert sum(outcomes) == metrics["accounting/episodes"] > 0
    fates = ("trained", "filtered", "unknown", "too_few_known", "masked", "too_old", "no_tokens")
    assert sum(metrics[f"accounting/{fate}"] for fate in fates) == metrics["accounting/episodes"]


def test_an_empty_batch_has_counts_and_no_means():
    empty = build_data([], AlgorithmConfig())
    metrics = step_metrics([], empty, [], [], {}, 1, 1.0)
    assert metrics["accounting/episodes"] == metrics["generate/action_tokens"] == 0
    assert "reward/avg_raw_reward" not in metrics and "policy/final_loss" not in metrics
    assert all(math.isfinite(v) for v in metrics.values())


def test_several_updates_of_one_batch():
    reports = [
        report(10.0, clipped_high=0.0, policy_loss=0.2, entropy_loss=-0.2, mismatch_k3=0.1, mismatch_excess=1.0),
        report(30.0, clipped_high=8.0, policy_loss=0.4, entropy_loss=-0.1, mismatch_k3=9.0, mismatch_excess=9.0),
    ]
    optims = [
        OptimReport(1.0, 1e-3, skipped=False, spike=True, skipped_total=6),
        OptimReport(math.nan, 5e-4, skipped=True, skipped_total=7),
    ]
    metrics = policy_metrics(reports, optims)
    assert metrics["policy/ppo_clip_ratio"] == metrics["policy/ppo_clip_ratio_high"] == 8 / 40
    assert metrics["policy/policy_loss"] == pytest.approx(0.3)
    assert metrics["policy/entropy_loss"] == pytest.approx(-0.15)
    assert metrics["policy/mismatch_kl"] == pytest.approx(0.1 / 10)  # the later update differs from μ on purpose
    assert metrics["policy/rollout_train_prob_diff_mean"] == pytest.approx(1.1)
    assert (metrics["policy/policy_update_steps"], metrics["policy/skipped_steps"]) == (1, 1)
    assert (metrics["policy/skipped_steps_total"], metrics["policy/grad_norm_spikes"]) == (7, 1)
    assert (metrics["policy/grad_norm"], metrics["policy/policy_lr"]) == (1.0, 5e-4)


def test_evaluation():
    sampled = step_groups()
    greedy = [Group(g.index, g.task_key, g.env_key, g.trajectories[:1]) for g in sampled]
    metrics = eval_metrics(sampled, greedy, 1.0)
    assert metrics["eval/all/pass_at_1"] == pytest.approx((0.5 + 0 + 1 + 1) / 4)
    assert metrics["eval/shop/pass_at_1"] == pytest.approx(0.25)
    assert metrics["eval/all/greedy_pass_at_1"] == pytest.approx((1 + 0 + 1) / 3)
    assert metrics["eval/a_b/greedy_avg_raw_reward"] == 1
    assert (metrics["eval/all/episodes"], metrics["eval/all/greedy_episodes"]) == (8, 4)
    assert metrics["eval/all/greedy_outcome/env_failed"] == metrics["eval/a_b/outcome/env_failed"] == 1
    assert metrics["eval/shop/unknown_reward_rate"] == 0.25
    assert metrics["eval/shop/tool_error_rate"] == 2 / 8
    assert metrics["eval/shop/avg_tokens_zero_rewards"] == (20 + 5) / 2
    assert (metrics["eval/all/tasks"], metrics["eval/all/greedy_tasks"]) == (4, 4)
    assert (metrics["eval/all/tasks_scored"], metrics["eval/all/greedy_tasks_scored"]) == (4, 3)


def test_a_completion_is_false_when_it_is_known_not_to_be_solved():
    fields = [(0.5, Outcome.COMPLETED), (1.0, Outcome.COMPLETED), (None, Outcome.COMPLETED), (0.0, Outcome.MAX_TURNS)]
    group = Group(0, "task0", "shop", [episode("shop", 0, s, *f, 1) for s, f in enumerate(fields)])
    assert eval_metrics([group], [], 1.0)["eval/shop/false_completion_rate"] == 1 / 2
    assert eval_metrics([group], [], 0.5)["eval/shop/false_completion_rate"] == 0
    unknown = Group(0, "task0", "shop", [episode("shop", 0, 0, None, Outcome.COMPLETED, 1)])
    assert "eval/shop/false_completion_rate" not in eval_metrics([unknown], [], 1.0)


def test_progress():
    assert progress_metrics(1, 16, 48) == {"trainer/global_step": 1, "trainer/epoch": 0}
    assert [progress_metrics(step, 16, 48)["trainer/epoch"] for step in (3, 4, 6, 7)] == [0, 1, 1, 2]


def counted_ngrams(ids: list[int]) -> tuple[int, int]:
    grams = [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)]
    return len(grams) - len(set(grams)), len(grams)


@pytest.mark.parametrize("length", [0, NGRAM - 1, NGRAM, 57, 2000])
@pytest.mark.parametrize("period", [3, 31, 10**6])
def test_repeated_ngrams_are_counted_as_by_hand(length, period):
    random = np.random.default_rng(length + period)
    ids = (np.arange(length, dtype=np.int32) % period) * 7
    ids[random.random(length) < 0.02] = 5
    assert repeated_ngrams(ids) == counted_ngrams(ids.tolist())


def test_attempts():
    assert attempt_metrics(ATTEMPTS, "eval/all") == {
        "eval/all/attempts_started": 11,
        "eval/all/attempts_retried": 2,
        "eval/all/attempts_aborted": 1,
        "eval/all/attempts_unstarted": 3,
    }
    assert "accounting/attempts_unstarted" not in attempt_metrics(ATTEMPTS, "accounting")


def test_staleness():
    assert async_metrics(np.array([0, 2, 1, 0]), 3, {"trainer_waits_share": 0.5}) == {
        "async/trainer_waits_share": 0.5,
        "async/staleness_mean": 0.75,
        "async/staleness_min": 0,
        "async/staleness_max": 2,
        "async/staleness_ratio": 0.5,
        "async/staleness_violation_count": 3,
    }
    assert async_metrics(np.zeros(0), 0, {}) == {"async/staleness_violation_count": 0}


def test_every_name_is_registered_once():
    correction = {"correction_weight": 18.0, "correction_weight_squared": 18.0, "corrected_tokens": 0.0}
    correction |= {"corrected_sequences": 0.0, "sequences": 2.0}
    routing = {"routing_choices": 6.0, "routing_possible": 8.0, "routing_disagreed": 3.0}
    full = [report(18.0, nll=1.0, entropy_loss=-0.1, **correction, **routing, **{"own/outside": 2.0})]
    gradient = dict.fromkeys(("snr", "megabytes_edited", "update_diversity", "effective_rank"), 0.5)
    optims = [OptimReport(grad_norm=2.0, lr=1e-3, skipped=False, gradient=gradient)]
    evaluated = eval_metrics(step_groups(), step_groups(), 1.0).keys()
    names = one_step(reports=full, optims=optims, probe=0.25).keys() | evaluated
    names = {*names, *attempt_metrics(ATTEMPTS, "accounting"), *attempt_metrics(ATTEMPTS, "eval/all")}
    waits = {"trainer_waits_share": 0.5, "engines_idle_share": 0.5, "unfinished_groups": 1, "replaced_groups": 0}
    waits |= {"overtaking_share": 0.5, "length_ratio": 1.0, "interrupted_episodes": 1, "recomputed_tokens": 9}
    names |= progress_metrics(1, 1, 1).keys() | async_metrics(np.array([0, 2]), 1, waits).keys()
    names |= {p.replace("{env}", "shop") for m in registry.METRICS if (p := m.pattern).startswith(ELSEWHERE)}
    names |= {
        "memory/train/parameters",
        "eval/all/uploads_failed",
        "generate/uploads_failed",
        "eval/all/tasks_held_out",
        "eval/lag_steps",
        "eval/lag_s",
    }  # tests/loop, tests/evaluation
    names |= {"generate/repeated_ngram_rate", "eval/all/repeated_ngram_rate"}  # of longer episodes than these
    for name in names:
        matching = [m.pattern for m in registry.METRICS if m.matches(name)]
        assert len(matching) == 1, (name, matching)
    unused = [m.pattern for m in registry.METRICS if not any(m.matches(name) for name in names)]
    assert unused == [], "documented but never emitted"
    assert registry.find("reward/invented") is None
    assert registry.find("reward/shop/pass_at_2").pattern == "reward/{env}/pass_at_{k}"


def test_the_docs_are_up_to_date():
    assert DOCS.read_text(encoding="utf-8") == registry.render(), (
        "run: python -m megatron_fleet.telemetry.registry > docs/reference/metrics.md"
    )


def test_distributions_are_of_known_finite_values():
    groups = step_groups()
    found = distributions(groups, build_data(groups, AlgorithmConfig(advantage="grpo_no_std")), np.array([0, 2]))
    assert found.keys() == DISTRIBUTIONS.keys()
    assert found["distribution/turns"].tolist() == [2, 4, 1, 1, 0, 2, 1, 1]
    assert found["distribution/response_tokens"].tolist() == [10, 20, 5, 5, 0, 10, 5, 5]
    assert found["distribution/prompt_reward"].tolist() == [0.5, 0.0, 1.0, 1.0]
    assert found["distribution/advantage"].dtype == np.float64
    assert distributions([], build_data([], AlgorithmConfig(advantage="grpo_no_std")), np.zeros(0)) == {}


def started(env_key, *metrics):
    empty = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)
    trajectories = [
        Trajectory("t", env_key, 0, i, *empty, (), None, "", Outcome.ENV_FAILED, metrics=dict(m))
        for i, m in enumerate(metrics)
    ]
    return Group(0, "t", env_key, trajectories)


def test_provisioning_metrics_by_hand():
    played = {"provision_s": 3.0, "start_retries": 2.0, "start_limit": 4.0, "breaker_open": 0.0, "loop_lag_p99": 0.01}
    played["attempts_retried"] = 2
    quick = played | {
        "provision_s": 1.0,
        "start_retries": 1.0,
        "start_limit": 8.0,
        "attempts_retried": 1,
        "loop_lag_p99": 0.5,
    }
    refused = {"quarantined": 1.0, "breaker_open": 1.0, "start_limit": 6.0, "loop_lag_p99": 0.02}
    found = provisioning_metrics([started("a/b", played, quick), started("a/b", refused, {}), started("c", {})])
    assert found == {
        "environment/a_b/quarantined": 1,
        "environment/a_b/breaker_open": 1,
        "environment/a_b/start_retries": 3,
        "environment/a_b/attempts_retried": 3,
        "timing/provision_s/a_b": 2.0,  # of those that asked for one
        "timing/start_limit/a_b": 6.0,
        "environment/c/quarantined": 0,
        "environment/c/breaker_open": 0,
        "environment/c/start_retries": 0,
        "environment/c/attempts_retried": 0,
        "timing/loop_lag_p99": 0.5,
    }
    assert all(registry.find(name) for name in found)
