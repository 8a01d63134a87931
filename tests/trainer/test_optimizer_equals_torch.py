"""The optimizer's step is that of torch's AdamW on the whole model."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from policy_fixtures import make_batch, make_config, write_config

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig
from megatron_fleet.trainer.base import AdamParams
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

LOSS = make_loss(AlgorithmConfig())
OF_THE_CONFIGURATION = {"betas": [0.7, 0.8], "eps": 1e-5, "weight_decay": 0.3, "clip_grad": 0.01}


@pytest.fixture
def policy(tmp_path):
    folder = write_config(tmp_path / "model", num_hidden_layers=1)
    made = MegatronPolicy(make_config(folder, **OF_THE_CONFIGURATION), init="random")
    yield made
    made.close()


@pytest.mark.parametrize(
    "adam",
    [
        AdamParams(1e-2),
        AdamParams(3e-3, betas=(0.5, 0.9), eps=1e-4, weight_decay=0.2, clip_grad=0.05),
        AdamParams(1e-2, clip_grad=1e9),
        2e-3,
    ],
    ids=["defaults", "all set", "a norm that is never reached", "those of the configuration"],
)
def test_a_step_is_that_of_adamw(policy, adam):
    chunk = policy.model_chunks[0]
    copies = {n: torch.nn.Parameter(p.detach().clone()) for n, p in chunk.named_parameters()}
    settings = adam if isinstance(adam, AdamParams) else AdamParams(adam, (0.7, 0.8), 1e-5, 0.3, 0.01)
    decay, rest = ([p for p in copies.values() if (p.dim() > 1) == matrix] for matrix in (True, False))
    assert len(decay) == 6 and len(rest) == 5
    how = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    groups = [{"params": decay, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, **how)
    clipped = []
    for seed in range(3):
        policy.forward_backward([make_batch(count=3, longest=40, seed=seed)], LOSS)
        for name, parameter in chunk.named_parameters():
            copies[name].grad = parameter.main_grad.clone()
        norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in copies.values()))
        if settings.clip_grad < math.inf:
            torch.nn.utils.clip_grad_norm_(copies.values(), settings.clip_grad)
        clipped.append(norm > settings.clip_grad)
        expected.step()
        report = policy.optim_step(adam)
        assert report.grad_norm == pytest.approx(norm, rel=1e-5) and report.lr == settings.lr
        for name, parameter in chunk.named_parameters():
            assert not parameter.main_grad.any()
            torch.testing.assert_close(parameter.detach(), copies[name].detach(), rtol=2e-5, atol=2e-6, msg=name)
    assert all(clipped) == (settings.clip_grad < 1) and any(clipped) == all(clipped)


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_next_step_is_as_if_it_had_not_been(policy):
    chunk = policy.model_chunks[0]
    batches = [[make_batch(count=2, longest=40, seed=seed)] for seed in range(2)]
    policy.forward_backward(batches[0], LOSS)
    policy.optim_step(1e-2)
    before = {n: p.detach().clone() for n, p in chunk.named_parameters()}
    policy.forward_backward(batches[1], LOSS)
    next(iter(chunk.parameters())).main_grad.view(-1)[3] = math.inf
    report = policy.optim_step(1e-2)
    assert report.skipped and report.grad_norm == math.inf
    assert all(torch.equal(p, before[n]) and not p.main_grad.any() for n, p in chunk.named_parameters())
    steps = [group["step"] for group in policy._optimizer.param_groups]
    policy.forward_backward(batches[1], LOSS)
    assert not policy.optim_step(1e-2).skipped
    assert [group["step"] for group in policy._optimizer.param_groups] == [step + 1 for step in steps]
    assert not any(torch.equal(p, before[n]) for n, p in chunk.named_parameters())


def test_no_more_gradients_are_added_to_a_step_that_is_held(policy):
    batch = [make_batch(count=2, longest=40)]
    policy.forward_backward(batch, LOSS)
    assert policy.optim_step(1e-2, hold_above=0.0).held
    with pytest.raises(RuntimeError, match="held optimizer step"):
        policy.forward_backward(batch, LOSS)
    policy.discard_gradients()
    policy.forward_backward(batch, LOSS)
    norm = policy.optim_step(1e-2, hold_above=0.0).grad_norm
    assert not policy.optim_step(1e-2, hold_above=norm).held  # not above its own norm
