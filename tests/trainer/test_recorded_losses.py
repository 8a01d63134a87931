"""Losses of micro-batches and of their sequences, beside a loss that they leave as it is."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from policy_fixtures import make_batch

from megatron_fleet.algorithms.loss_inputs import LossInputs
from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.trainer.verbs import RecordedLosses

MICRO_BATCHES = [make_batch(count=3), [], make_batch(count=2, seed=1)]


def inputs(micro_batch) -> LossInputs:
    """As of a forward pass, with arbitrary log-probs."""
    trained = [datum.loss_mask for datum in micro_batch]

    def joined(name):
        parts = [getattr(datum, name)[where] for datum, where in zip(micro_batch, trained, strict=True)]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts]))

    sequence = np.repeat(np.arange(len(micro_batch)), [int(where.sum()) for where in trained])
    logprobs = (joined("behaviour_logprobs") + 0.01).requires_grad_()
    rest = {
        "loss_scale": torch.full_like(logprobs, micro_batch[0].loss_scale if micro_batch else 0).detach(),
        "scaled_advantages": joined("scaled_advantages"),
        "behaviour": joined("behaviour_logprobs"),
    }
    rest |= {"sequence": torch.from_numpy(sequence), "sequences": len(micro_batch)}
    return LossInputs(logprobs, torch.zeros_like(logprobs), arrays={"proximal": logprobs.detach() - 0.1}, **rest)


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "gmpo"])
def test_sequences_add_up_to_their_micro_batch(name):
    """Those that take one ratio per sequence are sums over sequences, too."""
    loss = make_loss(AlgorithmConfig(loss=name))
    losses = RecordedLosses(loss, MICRO_BATCHES, per_sequence=True)
    for micro_batch in MICRO_BATCHES:
        x = inputs(micro_batch)
        total, sums = losses(x)
        expected, expected_sums = loss(x)
        assert torch.equal(total, expected) and total.requires_grad
        assert sums.keys() == expected_sums.keys()
    losses(inputs([]))  # one more, which the layout needs
    assert [len(values) for values in losses.sequences()] == [3, 0, 2]
    totals = losses.micro_batches()
    assert len(totals) == 3 and totals[1] == 0
    for values, total in zip(losses.sequences(), totals, strict=True):
        assert sum(values) == pytest.approx(total, abs=1e-6)


def test_the_sequence_that_is_not_finite_is_the_only_one():
    micro_batches = [make_batch(count=3)]
    micro_batches[0][1].scaled_advantages[-1] = np.nan
    losses = RecordedLosses(make_loss(AlgorithmConfig()), micro_batches, per_sequence=True)
    losses(inputs(micro_batches[0]))
    assert np.isfinite(losses.sequences()[0]).tolist() == [True, False, True]
    assert np.isnan(losses.micro_batches()).all()


def test_sequences_are_evaluated_on_request_alone():
    calls = []

    def loss(x):
        calls.append(len(x.logprobs))
        return x.logprobs.sum(), {}

    losses = RecordedLosses(loss, MICRO_BATCHES, per_sequence=False)
    assert losses.micro_batches() == []
    losses(inputs(MICRO_BATCHES[0]))
    assert len(calls) == 1
    assert losses.sequences() is None
    assert len(losses.micro_batches()) == 1
