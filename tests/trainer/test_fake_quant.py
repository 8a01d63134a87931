"""Routed experts compute with the values that an INT4 export of their weights holds, and train through the rounding."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from lora_ranks import LORA, MegatronPolicy, config_of, loss
from policy_fixtures import make_batch, make_config
from tiny_models import make

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import LoraConfig
from megatron_fleet.config.validate import check
from megatron_fleet.trainer.megatron import fake_quant, parallel
from megatron_fleet.trainer.megatron.fake_quant import int4_values
from megatron_fleet.weights.quant import int4

FAMILY = "kimi_k2_thinking"


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).view(torch.int16)


def packed_and_back(weights: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Values in an INT4 folder written from BF16 weights, and whether every group was representable."""
    array = weights.contiguous().view(torch.uint16).numpy()
    scales, exact = int4.choose_scales(array)
    packed = np.empty((array.shape[0], array.shape[1] // 8), np.int32)
    int4.quantize(array, scales, packed)
    out = np.empty_like(array)
    int4.dequantize(packed, scales, out)
    return torch.from_numpy(out).view(torch.bfloat16), bool(exact.all())


@pytest.mark.parametrize("size", [1.0, 0.02, 1e-6, 1e-38, 1e30])
def test_values_are_those_of_an_export(size):
    weights = (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * size).bfloat16()
    weights[3, 32:64] = 0
    values = int4_values(weights)
    exported, _ = packed_and_back(weights)
    assert torch.equal(values, exported)
    assert not values[3, 32:64].any()
    # Written once more, whether from these values or in another layout's pieces, nothing changes.
    again, exact = packed_and_back(values)
    assert exact and torch.equal(again, values)
    assert torch.equal(int4_values(values), values)
    parts = [int4_values(part) for part in weights.split(64, dim=1)]
    assert torch.equal(torch.cat(parts, dim=1), values)


def test_values_follow_the_declared_arithmetic():
    weights = torch.randn(16, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    groups = weights.float().view(16, 3, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    codes = (groups / scale).round().clamp(-7, 7)
    assert torch.equal(int4_values(weights), (codes * scale).bfloat16().view(16, 96))
    wide = weights.float()
    assert int4_values(wide).dtype == torch.float32 and torch.equal(int4_values(wide), int4_values(weights).float())


def test_int4_weights_made_by_this_arithmetic_are_a_fixed_point():
    """For every mantissa that the greatest magnitude of a group can have."""
    greatest = torch.arange(128, 256).bfloat16() / 4096
    scales = (greatest.float() / 7).bfloat16()[:, None]
    codes = torch.randint(-7, 8, (128, 32), generator=torch.Generator().manual_seed(2))
    codes[:, 5] = 7
    weights = codes.bfloat16() * scales
    assert torch.equal(int4_values(weights), weights)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make(FAMILY, tmp_path_factory.mktemp("fake_quant") / FAMILY, torch.float32)


def experts(policy: MegatronPolicy) -> dict[str, torch.nn.Parameter]:
    return {
        name: p
        for chunk in policy.model_chunks
        for name, p in chunk.named_parameters()
        if ".mlp.experts." in name and "adapters" not in name
    }


@torch.no_grad()
def shake(policy: MegatronPolicy) -> None:
    """Move the experts off the INT4 grid that their folder holds."""
    generator = torch.Generator().manual_seed(7)
    for parameter in experts(policy).values():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)


def policy_of(model: Path, lora: LoraConfig | None = None, **policy: str) -> MegatronPolicy:
    job = {"model": model, "parallel": {}, "lora": lora or LoraConfig(), **policy}
    return MegatronPolicy(config_of(job, model.parent))


def micro_batches() -> list:
    batch = make_batch(count=4, vocab_size=500, longest=30)
    return [batch[:2], batch[2:]]


def measure(policy: MegatronPolicy) -> tuple[list[np.ndarray], float, dict[str, torch.Tensor]]:
    """Log-probs, loss and gradients."""
    logprobs = [x for micro_batch in policy.forward(micro_batches()) for x in micro_batch]
    value = policy.forward_backward(micro_batches(), loss).loss
    gradients = {n: p.main_grad.clone() for n, p in policy.model_chunks[0].named_parameters() if p.requires_grad}
    return logprobs, value, gradients


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_quantised_model_is_the_model_of_the_rounded_weights(model, recompute):
    policy = policy_of(model, fake_quant="int4_experts", recompute=recompute)
    try:
        shake(policy)
        masters = {name: p.detach().clone() for name, p in experts(policy).items()}
        logprobs, value, gradients = measure(policy)
        published = {name: tensor.clone() for name, tensor in policy.weight_source()}
        assert all(torch.equal(p, masters[name]) for name, p in experts(policy).items())
    finally:
        policy.close()
    plain = policy_of(model, recompute=recompute)
    try:
        shake(plain)
        unrounded, _, _ = measure(plain)
        plain._wrapped[0].zero_grad_buffer()
        with torch.no_grad():
            for name, parameter in experts(plain).items():
                parameter.copy_(int4_values(masters[name]))
        expected_logprobs, expected_value, expected = measure(plain)
        exported = dict(plain.weight_source())
    finally:
        plain.close()
    assert max(np.abs(a - b).max() for a, b in zip(logprobs, unrounded, strict=True)) > 1e-3
    assert all(np.array_equal(a, b) for a, b in zip(logprobs, expected_logprobs, strict=True))
    assert value == expected_value
    assert gradients.keys() == expected.keys() and len(gradients) > 50
    assert all(torch.equal(gradients[name], expected[name]) for name in gradients)
    assert all(torch.equal(published[name], exported[name]) for name in exported)


def test_training_moves_the_masters_below_the_grid(model):
    policy = policy_of(model, fake_quant="int4_experts")
    try:
        shake(policy)
        before = {name: p.detach().clone() for name, p in experts(policy).items()}
        rounded = {name: int4_values(p) for name, p in before.items()}
        measure(policy)
        policy.optim_step(1e-5)
        after = experts(policy)
        assert all((after[name] != before[name]).any() for name in before)
        still = sum(int((int4_values(after[n].detach()) == rounded[n]).sum()) for n in before)
        assert 0.9 < still / sum(p.numel() for p in before.values()) < 1
    finally:
        policy.close()


def test_frozen_experts_are_rounded_once(model):
    policy = policy_of(model, lora=LORA, fake_quant="int4_experts")
    try:
        for parameter in experts(policy).values():
            assert torch.equal(int4_values(parameter.detach()), parameter)
        name = "model.layers.1.mlp.experts.0.down_proj.weight"
        published = dict(policy.weight_source())[name]
        assert torch.equal(published, int4_values(published))
        measure(policy)
    finally:
        policy.close()


def test_no_quantised_copy_waits_for_the_backward_pass(model, monkeypatch):
    made: list[weakref.ref] = []

    def recorded(weights: torch.Tensor) -> torch.Tensor:
        values = int4_values(weights)
        made.append(weakref.ref(values.untyped_storage()))
        return values

    monkeypatch.setattr(fake_quant, "int4_values", recorded)
    policy = policy_of(model, fake_quant="int4_experts")
    try:
        alive: list[int] = []

        def at_the_end(x):
            alive.append(sum(ref() is not None for ref in made))
            return loss(x)

        policy.forward_backward(micro_batches()[:1], at_the_end)
        assert len(made) == 2 * 3 * 8 * 2  # forward and backward, 3 layers, 8 experts, 2 matrices
        assert alive == [0]
    finally:
        policy.close()


def test_a_model_without_experts_is_refused(tmp_path):
    try:
        with pytest.raises(UserError, match=r"policy.fake_quant=int4_experts, and this model has no experts"):
            policy_of(make("qwen3", tmp_path / "qwen3", torch.float32), fake_quant="int4_experts")
    finally:
        parallel.shutdown()


@pytest.mark.parametrize(("hidden", "width", "size"), [(96, 64, 4), (96, 48, 1), (80, 64, 1)])
def test_rows_that_end_within_a_group_are_refused(hidden, width, size):
    config = SimpleNamespace(
        num_moe_experts=8, hidden_size=hidden, moe_ffn_hidden_size=width, expert_tensor_parallel_size=size
    )
    settings = make_config(Path("none")).policy.model_copy(update={"fake_quant": "int4_experts"})
    with pytest.raises(UserError, match=rf"hidden_size={hidden}, moe_intermediate_size={width} over {size} ranks"):
        fake_quant.quantise_experts([SimpleNamespace(config=config)], settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fake_quant": "int4_experts", "lora": {"rank": 8, "targets": ["attention", "experts"]}},
            "leave the INT4 grid",
        ),
        ({"lora": {"rank": 8, "targets": ["experts"]}}, r"policy.lora.targets=\[experts\] leaves ranks without dense"),
        ({"lora": {"export": "adapters"}}, "policy.lora.export=adapters needs policy.lora.rank above 0"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes, message):
    config = make_config(Path("none"))
    check(config)
    policy = type(config.policy).model_validate(config.policy.model_dump() | changes)
    with pytest.raises(UserError, match=message):
        check(config.model_copy(update={"policy": policy}))


def test_int4_values_and_fp8_are_refused():
    config = make_config(Path("none"), dtype="bfloat16")
    policy = config.policy.model_copy(update={"fake_quant": "int4_experts"})
    precision = type(config.precision)(recipe="fp8_blockwise")
    with pytest.raises(UserError, match=r"policy.fake_quant=int4_experts with precision.recipe=fp8_blockwise"):
        check(config.model_copy(update={"policy": policy, "precision": precision}))
