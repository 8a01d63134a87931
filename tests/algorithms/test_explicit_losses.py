"""Losses in numpy, with written-out gradients, against the differentiated ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from loss_fixtures import gradients, normalisers, pack, samples  # noqa: E402

from megatron_fleet.algorithms.datum import Datum  # noqa: E402
from megatron_fleet.algorithms.explicit_losses import TERMS, TrainedTokens, explicit_loss  # noqa: E402
from megatron_fleet.algorithms.loss_metrics import MAX_LOG_RATIO  # noqa: E402
from megatron_fleet.algorithms.losses import make_loss  # noqa: E402
from megatron_fleet.algorithms.policy_terms import POLICY_TERMS  # noqa: E402
from megatron_fleet.config.schema import CORRECTION_BOUNDS, AlgorithmConfig  # noqa: E402

SETTINGS = {
    "ppo_clip": [{}, {"clip_low": 0.15, "clip_high": 0.3}, {"dual_clip": 1.2}],
    "gspo": [{}, {"clip_low": 0.15, "clip_high": 0.3}],
    "gmpo": [{}, {"clip_low": 0.15, "clip_high": 0.3}, {"clip_low": 1.0}],
    "sapo": [{}, {"tau_positive": 2.0}],
    "cispo": [{}, {"clip_low": 0.15, "clip_high": 0.3}],
    "reinforce": [{}],
    "importance_weighted": [{}, {"clip_low": 0.15, "clip_high": 0.3}],
}
CORRECTIONS = ("off", *CORRECTION_BOUNDS)
KL = (None, "k1", "k2", "k3")


def as_data(batch, scales, proximal, reference) -> tuple[list[Datum], list[np.ndarray]]:
    """The samples behind two tokens of a prompt each, and the current policy's log-probs of all tokens."""
    data, logprobs = [], []
    for sample, scale in zip(batch, scales, strict=True):

        def whole(values) -> np.ndarray:
            return np.concatenate([np.zeros(2), np.asarray(values, np.float64)])

        arrays = {"proximal": whole(sample.old)} if proximal else {}
        arrays |= {"reference": whole(sample.reference)} if reference else {}
        mask = whole(np.ones(len(sample))) > 0
        advantages = mask * sample.advantage * scale
        data.append(Datum(np.zeros(len(mask), np.int32), mask, advantages, whole(sample.behaviour), scale, arrays))
        logprobs.append(whole(sample.logprobs.detach()))
    return data, logprobs


def assert_equal(algo, batch, proximal=True) -> None:
    scales, reference = normalisers(batch, "token_mean"), algo.kl.coef > 0
    value, sums = make_loss(algo)(pack(batch, scales, proximal=proximal, reference=reference))
    value.backward()
    found = explicit_loss(algo, TrainedTokens.of(*as_data(batch, scales, proximal, reference)))
    assert found.value == pytest.approx(value.item(), rel=1e-11, abs=1e-14)
    np.testing.assert_allclose(found.gradient, gradients(batch).numpy(), rtol=1e-10, atol=1e-14)
    expected = {name: float(one) for name, one in sums.items() if name != "entropy"}
    assert found.sums == pytest.approx(expected, rel=1e-6, abs=1e-9)  # counts are float32 there


def test_every_loss_is_here():
    assert set(TERMS) == set(POLICY_TERMS) == set(SETTINGS)


@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize(("name", "settings"), [(n, s) for n, all_of in SETTINGS.items() for s in all_of])
def test_value_gradient_and_sums_equal_the_differentiated_loss(name, settings, proximal):
    kinds = itertools.product(CORRECTIONS, KL, (0.05, 0.6))
    for number, (correction, kl, update) in enumerate(kinds):
        more = {} if kl is None else {"kl": {"coef": 0.1, "estimator": kl}}
        algo = AlgorithmConfig(loss=name, correction={"kind": correction}, **settings, **more)
        assert_equal(algo, samples(update, seed=number), proximal)


@pytest.mark.parametrize("apart", [-2 * MAX_LOG_RATIO, 2 * MAX_LOG_RATIO, 1000.0])
@pytest.mark.parametrize("name", TERMS)
def test_policies_far_apart_are_bounded_alike(name, apart):
    batch = samples()
    for sample in batch[::2]:
        sample.old, sample.reference, sample.behaviour = (
            sample.old + apart, sample.reference + apart, sample.behaviour + apart
        )  # fmt: skip
    for kl in ("k1", "k2", "k3"):
        assert_equal(AlgorithmConfig(loss=name, kl={"coef": 0.1, "estimator": kl}), batch)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", TERMS)
def test_unknown_log_probs_of_the_sampler_are_left_out_alike(name, correction):
    batch = samples()
    batch[2].behaviour[3] = np.nan
    assert_equal(AlgorithmConfig(loss=name, correction={"kind": correction}), batch)


def test_data_without_trained_tokens_have_no_loss():
    datum = Datum(np.zeros(3, np.int32), np.zeros(3, bool), np.zeros(3), np.zeros(3))
    found = explicit_loss(AlgorithmConfig(), TrainedTokens.of([datum], [np.zeros(3)]))
    assert found.value == 0 and len(found.gradient) == 0 and found.sums["tokens"] == 0
