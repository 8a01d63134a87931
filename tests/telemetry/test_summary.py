"""The summary of a run that was resumed, computed by hand from its log."""

import json

import pytest

from megatron_fleet.telemetry.sinks import MetricsLog
from megatron_fleet.telemetry.summary import summarise, write_summary


def step(number: int, time: float, attempt: float, **more: float) -> dict:
    return {
        "step": number,
        "time": time,
        "attempt": attempt,
        "accounting/attempts_started": 11,
        "accounting/attempts_retried": 2,
        "accounting/attempts_aborted": 1,
        "accounting/episodes": 8,
        "accounting/trained": 6,
        "accounting/unknown": 2,
        "accounting/trained_tokens": 100,
        "generate/action_tokens": 120,
        "generate/outcome/completed": 6,
        "generate/outcome/env_failed": 2,
        "policy/mismatch_kl": 0.001 * number,
        "policy/weight_version": number,
        **more,
    }


def evaluation(pass_at_1: float) -> dict:
    return {
        "eval/all/pass_at_1": pass_at_1,
        "eval/all/greedy_pass_at_1": pass_at_1 / 2,
        "eval/all/attempts_started": 6,
        "eval/all/attempts_retried": 1,
        "eval/all/attempts_aborted": 0,
        "eval/all/episodes": 4,
        "eval/all/outcome/completed": 4,
        "eval/all/action_tokens": 50,
        "eval/all/greedy_episodes": 1,
        "eval/all/greedy_outcome/max_turns": 1,
        "eval/all/greedy_action_tokens": 10,
    }


def test_a_resumed_run():
    rows = [
        {"step": 0, "time": 1010.0, "attempt": 1000.0, **evaluation(0.2)},
        step(1, 1030.0, 1000.0),
        step(2, 1040.0, 1000.0, **evaluation(0.4)),
        step(3, 5025.0, 5000.0, **evaluation(0.8)),
    ]
    summary = summarise(rows)
    assert summary == {
        "pass_at_1_before": 0.2,
        "pass_at_1_after": 0.8,
        "greedy_pass_at_1_before": 0.1,
        "greedy_pass_at_1_after": 0.4,
        "steps": 3,
        "seconds_to_first_step": 30.0,
        "seconds_total": 40.0 + 25.0,
        "episodes_started": 3 * (8 + 2 + 1) + 3 * (4 + 1 + 1),
        "episodes_retried": 3 * 2 + 3 * 1,
        "episodes_aborted": 3,
        "episodes_by_outcome": {"completed": 18 + 12, "max_turns": 3, "env_failed": 6},
        "episodes_by_fate": {
            "trained": 18,
            "filtered": 0,
            "unknown": 6,
            "too_few_known": 0,
            "masked": 0,
            "too_old": 0,
            "no_tokens": 0,
        },
        "tokens_generated": 3 * 120 + 3 * 60,
        "tokens_trained": 300,
        "mismatch_kl": pytest.approx(0.002),
        "weight_versions": 3,
    }
    played_again = summary["episodes_retried"] + summary["episodes_aborted"]
    assert sum(summary["episodes_by_outcome"].values()) == summary["episodes_started"] - played_again


def test_what_the_log_cannot_tell_is_none():
    summary = summarise([step(1, 12.0, 10.0)])
    assert summary["pass_at_1_before"] is summary["pass_at_1_after"] is None
    empty = summarise([])
    assert empty["steps"] == empty["episodes_started"] == 0
    assert empty["seconds_to_first_step"] is empty["mismatch_kl"] is None


def test_it_is_written_whole(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", None)
    log.write(0, {"eval/all/pass_at_1": 0.5})
    log.write(1, {"eval/all/pass_at_1": float("nan"), "accounting/episodes": 8})
    log.close()
    (tmp_path / "summary.json").write_text("old")
    summary = write_summary(tmp_path / "metrics.jsonl", tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (summary["pass_at_1_before"], summary["pass_at_1_after"]) == (0.5, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]
