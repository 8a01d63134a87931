"""A hosted run is the native run: the same configuration with the ranks and engines of a run, and at a service that has
the same rank and the same engine behind its protocol.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from tinker_service import BASE_MODEL, KEY, running
from whole_runs import Run

pytest.importorskip("tinker")
pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("vllm")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
COMMON = (
    *("policy.lora.rank=8", "policy.lora.alpha=32", "policy.optimizer.lr=3e-3", "policy.lora.export=adapters"),
    *("rollout.sampling.temperature=1", "algorithm.entropy_coef=0"),
)
NOT_RETURNED = {"policy/policy_entropy"}
"""The service returns log-probs alone."""
ONE_PASS = {
    "policy/policy_loss": 2e-7,
    "policy/final_loss": 2e-7,
    "policy/mismatch_kl": 1e-14,
    "policy/mismatch_kl_k1": 1e-13,
    "policy/rollout_train_prob_diff_mean": 1e-13,
    "policy/rollout_train_prob_diff_std": 2e-13,
}
"""Absolute tolerances, at least ten times the measured differences: ranks sum the same terms in float32, the hosted
trainer in float64.
"""
TWO_PASSES = {
    "policy/policy_loss": 2e-7,
    "policy/final_loss": 2e-7,
    "policy/kl_loss": 3e-9,
    "policy/policy_kl": 5e-8,
    "policy/ratio_mean": 4e-7,
    "policy/grad_norm": 5e-7,
    "policy/mismatch_kl": 2e-12,
    "policy/mismatch_kl_k1": 2e-7,
    "policy/rollout_train_prob_diff_mean": 2e-7,
    "policy/rollout_train_prob_diff_std": 3e-6,
}
"""The same where the hosted trainer computes the gradient of the loss, in float64 and with reference log-probs of the
engine, while ranks compute both in float32.
"""


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Play the same run natively and at a service."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def played(*overrides: str) -> tuple[Run, Run]:
        native = Run(tmp_path / "native", (*COMMON, *overrides))
        native.finish()
        with running(tmp_path / "service", "--model", str(ROOT / "assets" / "tiny")) as service:
            at = ("trainer=hosted", f"hosted.url={service.url}", f"hosted.base_model={BASE_MODEL}")
            hosted = Run(tmp_path / "hosted", (*at, *COMMON, *overrides))
            hosted.finish()
        return native, hosted

    return played


def assert_equal(native: Run, hosted: Run, metrics: dict[str, float], logprobs: float = 0.0) -> None:
    """Every episode is the same, and every metric that depends on no clock.

    Args:
        metrics: how far some of them may differ.
        logprobs: how far those of samples after an update may; if they are equal, so are all weights.
    """
    names = [path.stem for path in (native.out / "trajectories").glob("*.parquet")]
    assert {"step_000001", "step_000003", "eval_000003", "greedy_000003"} <= {*names}
    for name in names:
        tolerance = {} if name in ("eval_000000", "greedy_000000", "step_000001") else {"behaviour_logprobs": logprobs}
        for ours, theirs in zip(native.arrays(name), hosted.arrays(name), strict=True):
            assert ours.keys() == theirs.keys()
            for key, values in ours.items():
                assert np.allclose(values, theirs[key], rtol=0, atol=tolerance.get(key, 0)), (name, key)
    for ours, theirs in zip(native.facts(), hosted.facts(), strict=True):
        assert ours.keys() - theirs.keys() <= NOT_RETURNED
        for key, value in theirs.items():
            assert value == pytest.approx(ours[key], rel=0, abs=metrics.get(key, 0)), key
    exported, theirs = (
        safetensors.numpy.load_file(run.out / "hf" / "adapter_model.safetensors") for run in (native, hosted)
    )
    assert exported.keys() == theirs.keys() and any(values.any() for values in exported.values())
    assert all(np.allclose(values, theirs[name], rtol=0, atol=logprobs) for name, values in exported.items())
    assert len({row["policy/grad_norm"] for row in native.metrics()[1:]}) == 3


@pytest.mark.nightly(minutes=1.5)
def test_with_one_pass_for_each_update_all_is_equal_to_the_bit(both):
    assert_equal(*both(), ONE_PASS)


@pytest.mark.nightly(minutes=1.5)
def test_with_a_loss_that_torch_differentiates_two_passes_are_equal_to_the_bit(both, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"), prepend=":")
    assert_equal(*both("algorithm.loss=my_loss:asymmetric_clip", "policy.updates_per_batch=2"), ONE_PASS)


@pytest.mark.nightly(minutes=1.5)
def test_with_two_passes_the_gradient_is_equal_to_rounding(both):
    runs = both("algorithm.kl.coef=0.05", "policy.updates_per_batch=2")
    assert_equal(*runs, TWO_PASSES, logprobs=1e-4)
