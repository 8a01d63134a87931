"""Overlap of reductions in one process, whose reductions change nothing: updates are those without it, bit for bit."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
import torch
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.trainer.megatron import policy as policy_module
from megatron_fleet.trainer.megatron.gradient_overlap import GradientOverlap
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

LOSS = make_loss(AlgorithmConfig())
DATA = make_batch(count=6, longest=50)
PASSES = {
    "two micro-batches": [[DATA[:3], DATA[3:]]],
    "two passes": [[DATA[:2], DATA[2:4]], [DATA[4:]]],
    "an empty one at the end": [[DATA[:3], []]],
    "only an empty one again": [[DATA[:3]], [[]]],
}
BUCKET = 5000
"""Parameters; Megatron's own size would put the model into one bucket."""


@pytest.fixture
def make_policy(tmp_path, monkeypatch):
    alive = []

    def make(overlap, **changes):
        while alive:
            alive.pop().close()
        more = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": BUCKET} if overlap else {}
        monkeypatch.setattr(policy_module, "overlap_arguments", lambda policy, cuda: more)
        folder = write_config(tmp_path / "model", **{"num_hidden_layers": 2} | changes)
        alive.append(MegatronPolicy(make_config(folder, weight_decay=0.1), init="random"))
        return alive[-1]

    yield make
    while alive:
        alive.pop().close()


def trained(policy, passes):
    """Losses, norms, gradients before the last step, and parameters after it."""
    reports = []
    for _ in range(2):
        for micro_batches in passes:
            reports.append(policy.forward_backward(micro_batches, LOSS).loss)
        gradients = {n: p.main_grad.clone() for n, p in policy.model_chunks[0].named_parameters()}
        reports.append(policy.optim_step(1e-2).grad_norm)
    policy.gathered()
    return reports, gradients, {n: p.detach().clone() for n, p in policy.model_chunks[0].named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
def test_updates_are_those_without_overlap(make_policy, passes, tied):
    expected = trained(make_policy(False, tie_word_embeddings=tied), passes)
    policy = make_policy(True, tie_word_embeddings=tied)
    found = trained(policy, passes)
    assert len(policy._wrapped[0].bucket_groups) > 3 and len(policy._overlap._groups) > 3
    assert found[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-9) and found[0][-1] > 0
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_parts_are_reduced_during_the_last_backward_pass_from_the_output_to_the_input(make_policy, monkeypatch):
    policy = make_policy(True)
    groups = policy._overlap._groups
    places = {p: place for place, p in enumerate(policy._wrapped[0].module.parameters())}
    firsts = [min(places[p] for p in group.params) for group in groups]
    assert firsts == sorted(firsts, reverse=True) and len(set(firsts)) == len(groups)
    started = []
    monkeypatch.setattr(
        policy._overlap,
        "_starts",
        [
            lambda number=number, start=start, **how: (started.append(number), start(**how))
            for number, start in enumerate(policy._overlap._starts)
        ],
    )
    ends, end = [], GradientOverlap.end
    monkeypatch.setattr(GradientOverlap, "end", lambda self: (ends.append(len(started)), end(self)))
    policy.forward_backward([DATA[:2], DATA[2:4]], LOSS)
    assert started == list(range(len(groups))) and ends == [len(groups)]
    policy.discard_gradients()
    started.clear()
    ends.clear()
    policy.forward_backward([DATA[:2], []], LOSS)  # an empty micro-batch reaches no attention
    assert ends[0] < len(groups) and started == list(range(len(groups)))


def test_discarded_gradients_do_not_come_back(make_policy):
    policy = make_policy(True)
    before = np.concatenate(policy.forward([DATA])[0])
    policy.forward_backward([DATA], LOSS)
    policy.discard_gradients()
    assert policy.optim_step(0.0).grad_norm == 0
    policy.forward_backward([DATA], LOSS)
    norm = policy.optim_step(0.0).grad_norm
    other = make_policy(False)
    other.forward_backward([DATA], LOSS)
    assert other.optim_step(0.0).grad_norm == pytest.approx(norm, rel=1e-6)
    assert np.array_equal(np.concatenate(other.forward([DATA])[0]), before)


def test_a_parameter_that_is_used_twice_is_refused(make_policy):
    policy = make_policy(True)
    policy.forward_backward([DATA[:2]], LOSS)
    group = policy._overlap._groups[0]
    group.per_param_grad_ready_counts[next(iter(group.params))] = 2
    with pytest.raises(RuntimeError, match=r"set policy\.overlap=false"):
        policy._overlap.end()
