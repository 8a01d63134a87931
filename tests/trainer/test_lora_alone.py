"""Adapters in one process, against the same model with their product added to its weights."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
import torch
from policy_fixtures import make_batch, make_config, write_config
from safetensors.torch import load_file

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AlgorithmConfig, LoraConfig
from megatron_fleet.trainer.megatron import lora, parallel
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

RANK, ALPHA = 3, 6.0
SCALE = 2.0
"""alpha / rank"""
BATCH = make_batch(count=4, longest=40)
LOSS = make_loss(AlgorithmConfig(loss="reinforce"))


@pytest.fixture
def make_policy(tmp_path):
    """Builds policies one after the other: the process groups are per process."""
    alive = []

    def make(init="random", folder=None, recompute="none", seed=5, **adapters):
        while alive:
            alive.pop().close()
        config = make_config(folder or write_config(tmp_path / "model", num_hidden_layers=2), eps=1e-4)
        policy = {"lora": LoraConfig(**adapters), "recompute": recompute}
        config = config.model_copy(update={"policy": config.policy.model_copy(update=policy)})
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        alive.append(MegatronPolicy(config, init=init))
        return alive[-1]

    def adapted(**more):
        """With adapters whose B is not zero."""
        policy = make(**{"rank": RANK, "alpha": ALPHA, "targets": ("attention", "mlp")} | more)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for adapter in adapters_of(policy):
                adapter.b.copy_(0.1 * torch.randn(adapter.b.shape, generator=generator))
        policy._optimizer.reload_model_params()
        return policy

    make.adapted = adapted
    yield make
    while alive:
        alive.pop().close()


def adapters_of(policy):
    return list(policy.model_chunks[0].adapters)


def layer(adapter):
    """Name of the parameter of Megatron's model that an adapter belongs to."""
    return adapter.name.removeprefix("adapters.") + ".weight"


def logprobs(policy, which="current"):
    return np.concatenate(policy.forward([BATCH], which)[0])


def gradients(policy):
    """Gradients of all trained parameters, by name."""
    policy.forward_backward([BATCH[:2], BATCH[2:]], LOSS)
    chunk = policy.model_chunks[0]
    return {n: p.main_grad.clone() for n, p in chunk.named_parameters() if p.requires_grad}


def test_the_product_is_added_to_the_weights_and_gradients_are_those_of_the_factors(make_policy, tmp_path):
    """y = (W + s·B·A)·x, so dA = s·Bᵀ·dW and dB = s·dW·Aᵀ, with dW of the merged model."""
    policy = make_policy.adapted()
    factors = {layer(each): (each.a.detach().clone(), each.b.detach().clone()) for each in adapters_of(policy)}
    assert len(factors) == 2 * 4 and all(b.any() for _, b in factors.values())
    weights = {n: p.detach().clone() for n, p in policy.model_chunks[0].named_parameters() if not p.requires_grad}
    found, got = logprobs(policy), gradients(policy)
    policy.export_hf(tmp_path / "merged")

    merged = make_policy("hf", tmp_path / "merged")
    whole = dict(merged.model_chunks[0].named_parameters())
    assert whole.keys() == weights.keys()
    for name, weight in weights.items():
        product = SCALE * factors[name][1] @ factors[name][0] if name in factors else 0
        torch.testing.assert_close(whole[name].detach(), weight + product, rtol=1e-6, atol=1e-7, msg=name)
    np.testing.assert_allclose(found, logprobs(merged), rtol=1e-5, atol=1e-5)
    of_merged, expected = gradients(merged), []
    for name, (a, b) in factors.items():
        expected += [SCALE * b.t() @ of_merged[name], SCALE * of_merged[name] @ a.t()]
    assert len(got) == len(expected) == 16
    for gradient, value in zip(got.values(), expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-3, atol=1e-6 + 1e-4 * float(value.abs().max()))


def test_training_begins_at_the_base_model_and_moves_adapters_alone(make_policy):
    base = logprobs(make_policy())
    policy = make_policy(rank=RANK, alpha=ALPHA)
    assert np.array_equal(logprobs(policy), base)
    chunk = policy.model_chunks[0]
    frozen = {n: p.detach().clone() for n, p in chunk.named_parameters() if not p.requires_grad}
    assert not any(hasattr(p, "main_grad") for p in chunk.parameters() if not p.requires_grad)
    for _ in range(2):  # the first step moves B, which begins at zero; the second one A, too
        before = {n: p.detach().clone() for n, p in chunk.named_parameters()}
        policy.forward_backward([BATCH], LOSS)
        assert policy.optim_step(1e-2).grad_norm > 0
    assert all(torch.equal(value, before[name]) for name, value in frozen.items())
    assert all(not torch.equal(p, before[n]) for n, p in chunk.named_parameters() if p.requires_grad)
    assert not np.allclose(logprobs(policy), base, atol=1e-4)


def test_the_reference_is_the_base_model_whatever_the_adapters_are(make_policy):
    base = logprobs(make_policy())
    policy = make_policy.adapted()
    adapted = logprobs(policy)
    assert not np.allclose(adapted, base, atol=1e-3)
    with pytest.raises(ValueError, match="keep_reference"):
        policy.forward([BATCH], "reference")
    policy.keep_reference()
    assert np.array_equal(logprobs(policy, "reference"), base)
    assert np.array_equal(logprobs(policy), adapted)
    with pytest.raises(KeyError), policy._reference.in_place():
        raise KeyError
    assert np.array_equal(logprobs(policy), adapted)


def test_first_values_follow_the_seed_and_the_layer(make_policy):
    first = {each.name: each.a.detach().clone() for each in adapters_of(make_policy(rank=RANK))}
    again, other = (
        {each.name: each.a.detach().clone() for each in adapters_of(make_policy(rank=RANK, seed=seed))}
        for seed in (5, 6)
    )
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not any(torch.equal(value, other[name]) for name, value in first.items())
    of_one_shape = [value for value in first.values() if value.shape == (RANK, 64)]
    assert len({value.sum().item() for value in of_one_shape}) == len(of_one_shape) > 3
    for name, value in first.items():
        bound = 1 / math.sqrt(value.shape[1])  # Kaiming uniform with slope √5, as peft
        assert 0.9 * bound < value.abs().max() <= bound and abs(value.mean()) < 0.2 * bound, name


def test_a_state_goes_on_to_the_bit_and_holds_no_base_model(make_policy, tmp_path):
    policy = make_policy.adapted()
    gradients(policy)
    policy.optim_step(1e-2)
    policy.save_state(tmp_path / "saved")
    size = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    trained = sum(p.numel() for p in policy.model_chunks[0].parameters() if p.requires_grad)
    assert size < 2 * (3 * 4 * trained) + (1 << 16) < 4 * sum(p.numel() for p in policy.model_chunks[0].parameters())
    saved, further = logprobs(policy), (gradients(policy), policy.optim_step(1e-2).grad_norm, logprobs(policy))
    policy = make_policy(rank=RANK, alpha=ALPHA)
    policy.load_state(tmp_path / "saved")
    assert np.array_equal(logprobs(policy), saved)
    got = gradients(policy), policy.optim_step(1e-2).grad_norm, logprobs(policy)
    assert all(torch.equal(value, further[0][name]) for name, value in got[0].items())
    assert got[1] == further[1] and np.array_equal(got[2], further[2])


def test_recomputed_layers_have_the_same_gradients(make_policy):
    found = {}
    for recompute in ("none", "full"):
        policy = make_policy.adapted(recompute=recompute)
        found[recompute] = gradients(policy)
    assert any(value.any() for value in found["none"].values())
    for name, value in found["none"].items():
        torch.testing.assert_close(found["full"][name], value, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("targets", "linears"),
    [
        (("attention",), {"linear_qkv", "linear_proj"}),
        (("mlp",), {"linear_fc1", "linear_fc2"}),
        (("attention", "mlp"), {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}),
    ],
)
def test_targets_are_adapted_and_nothing_else(make_policy, tmp_path, targets, linears):
    policy = make_policy(rank=RANK, alpha=ALPHA, targets=targets, export="adapters")
    names = [each.name for each in adapters_of(policy)]
    assert {name.rpartition(".")[2] for name in names} == linears and len(names) == len(set(names)) == 2 * len(linears)
    policy.export_hf(tmp_path / "peft")
    assert {p.name for p in (tmp_path / "peft").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert any("self_attn" in name for name in tensors) == ("attention" in targets)
    assert any("mlp" in name for name in tensors) == ("mlp" in targets)


def test_a_target_that_the_model_lacks_is_named(make_policy):
    try:
        with pytest.raises(UserError, match=r"policy\.lora\.targets names experts, which this model does not have"):
            make_policy(rank=RANK, targets=("attention", "experts"))
    finally:
        parallel.shutdown()  # its groups were there already


@pytest.mark.parametrize(
    ("key", "group"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", "attention"),
        ("decoder.layers.1.mlp.linear_fc1.weight", "mlp"),
        ("decoder.layers.1.mlp.shared_experts.linear_fc2.weight", "mlp"),
        ("decoder.layers.1.mlp.experts.linear_fc2.weight", "experts"),
        ("decoder.layers.1.mlp.router.weight", None),
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", None),
        ("decoder.layers.1.self_attention.linear_qkv.bias", None),
        ("output_layer.weight", None),
        ("mtp.layers.0.self_attention.linear_qkv.weight", None),
    ],
)
def test_which_weights_are_linear_layers_of_a_target(key, group):
    assert lora.group_of(key) == group
