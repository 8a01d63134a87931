"""The warning that engines sample from another policy than is trained."""

from __future__ import annotations

import logging
import math

import pytest

from megatron_fleet.config.load import load
from megatron_fleet.telemetry.alert_rules import AlertRules, mismatch_problem

BF16 = ("experiment=quickstart", "model.dtype=bfloat16")


def problem(kl: float | None, *overrides: str) -> str | None:
    return mismatch_problem(load([*BF16, *overrides]), {} if kl is None else {"policy/mismatch_kl": kl})


def test_a_usual_mismatch_is_no_problem():
    assert problem(None) is None and problem(0.001) is None and problem(0.05) is None
    assert problem(9.0, "policy.safety.mismatch_kl=null") is None
    assert problem(0.02, "policy.safety.mismatch_kl=0.01") and problem(math.nan)


def test_a_log_prob_that_is_not_a_number_is_a_problem_of_its_own():
    config = load(BF16)
    said = mismatch_problem(config, {"policy/mismatch_kl": 0.001, "policy/mismatch_unknown_tokens": 3.0})
    assert said.startswith("policy/mismatch_unknown_tokens=3: ")
    assert mismatch_problem(config, {"policy/mismatch_kl": 0.001, "policy/mismatch_unknown_tokens": 0.0}) is None


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        ([], "and their formats are the same"),
        (["precision=fp8_blockwise"], "and their formats are the same"),
        (
            ["rollout.engine.quantization=fp8"],
            "precision.recipe=model_dtype with rollout.engine.quantization=fp8",
        ),
        (
            ["precision=fp8_blockwise", "rollout.engine.quantization=none"],
            "precision.recipe=fp8_blockwise with rollout.engine.quantization=none",
        ),
        (["precision=fp8_tensorwise"], "precision.recipe=fp8_tensorwise with rollout.engine.quantization=auto"),
        (["rollout.engine.kv_cache_dtype=fp8"], "maybe for rollout.engine.kv_cache_dtype=fp8"),
        (["rollout.max_staleness=2"], "maybe for rollout.max_staleness=2"),
    ],
)
def test_the_warning_names_what_differs(overrides, cause):
    said = problem(0.2, *overrides)
    assert "policy/mismatch_kl=0.2 is above policy.safety.mismatch_kl=0.05" in said and cause in said


def test_a_step_says_it(tmp_path, caplog):
    rules = AlertRules(load([*BF16, f"run.out={tmp_path}"]))
    with caplog.at_level(logging.WARNING):
        rules.write(7, {"accounting/episodes": 4, "policy/mismatch_kl": 0.3})
    assert "step 7: policy/mismatch_kl=0.3 is above" in caplog.text
