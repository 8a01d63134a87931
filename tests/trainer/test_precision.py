"""Precision and the optimizer's variants in Megatron: what is told to it, and that steps and checkpoints agree."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from megatron.core import fp8_utils
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from policy_fixtures import write_config
from torch import nn

from megatron_fleet.config.schema import OptimizerConfig, ParallelConfig, PrecisionConfig
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.trainer.base import AdamParams
from megatron_fleet.trainer.megatron import build, optimizer, parallel, state
from megatron_fleet.trainer.megatron.build import fill_random
from megatron_fleet.trainer.megatron.precision import filled_in_full, precision_arguments
from megatron_fleet.trainer.megatron.saving import Save

BF16 = torch.bfloat16
PLAIN = PrecisionConfig()


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2, vocab_size=64)
    parallel.initialise(ParallelConfig(), 0)
    yield json.loads((folder / "config.json").read_text())
    parallel.shutdown()


class Trainer:
    """Model and optimizer of a variant, always from the same weights, stepped with gradients drawn from a seed."""

    def __init__(self, hf, precision=PLAIN, dtype=BF16, **changes):
        self.settings = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, **changes)
        arguments = precision_arguments(precision, self.settings, experts=False)
        chunks = build.build_chunks(hf, ParallelConfig(), dtype, 64)
        fill_random(chunks, 0.06, 5, 64)
        self.wrapped = [optimizer.wrap(chunk, arguments.gradients) for chunk in chunks]
        self.adam = optimizer.build(self.wrapped, self.settings, dtype, arguments.optimizer)
        optimizer.clear(self.wrapped, self.adam)

    def parameters(self):
        return dict(self.wrapped[0].module.named_parameters())

    def step(self, count=3, seed=0, clip=1.0, lr=1e-3):
        """Gradient norms."""
        generator = torch.Generator().manual_seed(seed)
        norms = []
        for _ in range(count):
            for parameter in self.parameters().values():
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
            norms.append(self.take(lr, clip))
        return norms

    def take(self, lr, clip):
        """The gradient norm of a step with the gradients that are there."""
        reduced = optimizer.reduce_gradients(self.wrapped, self.adam)
        adam = dataclasses.replace(AdamParams.of(self.settings, lr), clip_grad=clip)
        optimizer.step(self.wrapped, self.adam, reduced, adam)
        return reduced.norm

    def weights(self):
        return {name: parameter.detach().float().clone() for name, parameter in self.parameters().items()}

    def master(self):
        """All float32 master weights, in one order."""
        (part,) = self.adam.chained_optimizers
        return torch.cat([weight.flatten() for group in part.shard_fp32_from_float16_groups for weight in group])


def furthest(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def differing(a, b):
    """Share of weights that are not equal to the last bit."""
    return sum((a[n] != b[n]).sum().item() for n in a) / sum(v.numel() for v in a.values())


def test_updates_too_small_for_bfloat16_add_up(hf):
    trainer = Trainer(hf)
    weight = trainer.wrapped[0].module.decoder.final_layernorm.weight
    start, master = weight.detach().clone(), trainer.master().clone()
    for step in range(1, 61):
        weight.main_grad.fill_(1.0)
        trainer.take(1e-4, clip=1e9)
        if step == 10:
            # Adam moves by 1e-4 each time; the bfloat16 below 1 is 4e-3 away.
            assert torch.equal(weight, start)
            assert (trainer.master() - master).min().item() == pytest.approx(-10e-4, rel=0.02)
    assert weight.float().mean().item() == pytest.approx(1 - 60e-4, abs=2e-3)


@pytest.mark.parametrize(("gradients", "exact"), [("float32", True), ("bfloat16", False)])
def test_gradients_add_up_in_the_type_of_the_configuration(hf, gradients, exact):
    trainer = Trainer(hf, PrecisionConfig(gradients=gradients))
    weight = trainer.wrapped[0].module.decoder.final_layernorm.weight
    assert weight.main_grad.dtype == getattr(torch, gradients)
    assert {buffer.grad_data.dtype for buffer in trainer.wrapped[0].buffers} == {getattr(torch, gradients)}
    weight.main_grad.fill_(256.0)
    for _ in range(8):
        # 256 + 1 is 256 in bfloat16. As the model's backward pass adds a micro-batch's gradient.
        weight.main_grad.add_(torch.ones_like(weight))
    assert (weight.main_grad == 264).all() == exact


def test_a_step_moves_by_the_gradient_of_its_type(hf):
    one, other = Trainer(hf), Trainer(hf, PrecisionConfig(gradients="bfloat16"))
    norms = one.step(), other.step()
    assert norms[1] == pytest.approx(norms[0], rel=1e-3) and norms[0] != norms[1]
    assert 0 < furthest(one.weights(), other.weights()) < 4e-3


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_states_in_host_memory_give_the_same_steps(hf, fraction):
    plain, offloaded = Trainer(hf), Trainer(hf, offload_fraction=fraction)
    (part,) = offloaded.adam.chained_optimizers
    on_host = sum(p.numel() for sub in part.optimizer.cpu_optimizers for g in sub.param_groups for p in g["params"])
    total = sum(p.numel() for p in plain.parameters().values())
    assert fraction <= on_host / total <= min(1, fraction + 0.2)
    assert plain.step() == offloaded.step()
    assert furthest(plain.weights(), offloaded.weights()) < 1e-4
    assert differing(plain.weights(), offloaded.weights()) < 1e-4


@pytest.mark.parametrize("changes", [{}, {"offload_fraction": 1.0}, {"moments": "bfloat16"}], ids=str)
def test_gradients_are_clipped_in_every_variant(hf, changes):
    def after(clip):
        trainer = Trainer(hf, **changes)
        # Adam does not see a constant factor, so it is the second step that shows whether its gradient was clipped.
        trainer.step(1, clip=1e9)
        trainer.step(1, seed=1, clip=clip)
        return trainer.weights()

    assert differing(after(1e9), after(1e-9)) > 0.05


def test_narrow_moments_stay_close(hf):
    plain, narrow = Trainer(hf), Trainer(hf, moments="bfloat16")
    (part,) = narrow.adam.chained_optimizers
    kept = {name: value.dtype for values in part.optimizer.state.values() for name, value in values.items()}
    assert kept == {"exp_avg": BF16, "exp_avg_sq": BF16, "master_param": torch.float32}
    assert plain.step() == narrow.step()
    assert 0 < furthest(plain.weights(), narrow.weights()) < 4e-3
    assert differing(plain.weights(), narrow.weights()) < 0.05


def test_master_weights_are_kept_whole():
    """Kept in half, they could not be read back from a checkpoint for any layout."""
    for changes in VARIANTS[1:]:
        told = precision_arguments(PLAIN, OptimizerConfig(lr=1e-3, **changes), experts=False).optimizer
        assert (
            MegatronOptimizerConfig(use_distributed_optimizer=True, bf16=True, **told).store_param_remainders is False
        )
        assert told["store_param_remainders"] is False


def test_the_limit_on_betas_is_where_bfloat16_moments_stop_decaying():
    def after(beta):
        moment = torch.linspace(1, 2, 128, dtype=BF16)
        for _ in range(3000):
            moment.copy_(moment.float() * beta)
        return moment.max().item()

    assert after(1 - 2**-8) < 1e-3
    assert after(0.997) > 0.5


VARIANTS = [{}, {"offload_fraction": 1.0}, {"offload_fraction": 0.4}, {"moments": "bfloat16"}]


@pytest.mark.parametrize(
    ("saver", "loader"), [*((v, {}) for v in VARIANTS), *(({}, v) for v in VARIANTS[1:]), VARIANTS[2:]], ids=str
)
def test_a_checkpoint_goes_on_in_every_variant(hf, tmp_path, saver, loader):
    first = Trainer(hf, **saver)
    first.step()
    Save(tmp_path / "saved", first.wrapped, first.adam, None).write()
    second = Trainer(hf, **loader)
    state.load(tmp_path / "saved", second.wrapped, second.adam)
    optimizer.clear(second.wrapped, second.adam)
    assert differing(first.weights(), second.weights()) == 0
    assert first.step(seed=1) == second.step(seed=1)
    narrow = "bfloat16" in (saver.get("moments"), loader.get("moments"))
    assert differing(first.weights(), second.weights()) < (0.1 if narrow else 1e-3)
    for part in second.adam.chained_optimizers if loader.get("offload_fraction") else ():
        # PyTorch's plain loop takes several times as long on the host.
        assert all(g["fused"] for sub in part.optimizer.cpu_optimizers for g in sub.param_groups)
    # Steps are counted on, so that the moments' start is corrected as far as it should be.
    assert {group["step"] for group in second.adam.param_groups} == {6}


def test_an_unused_variant_can_be_saved_before_its_first_step(hf, tmp_path):
    for number, changes in enumerate(VARIANTS):
        trainer = Trainer(hf, **changes)
        start = trainer.weights()
        Save(tmp_path / str(number), trainer.wrapped, trainer.adam, None).write()
        again = Trainer(hf, **changes)
        again.step()
        state.load(tmp_path / str(number), again.wrapped, again.adam)
        assert differing(start, trainer.weights()) == differing(start, again.weights()) == 0
        assert trainer.step() == again.step()
        assert differing(trainer.weights(), again.weights()) == 0


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (PrecisionConfig(recipe="fp8_tensorwise"), ("hybrid", "tensorwise", False, False)),
        (
            PrecisionConfig(recipe="fp8_tensorwise", fp8_param_gather=True, bf16_layers_at_end=1),
            ("hybrid", "tensorwise", True, True),
        ),
        (PrecisionConfig(recipe="fp8_blockwise", bf16_layers_at_start=2), ("e4m3", "blockwise", False, True)),
        (PrecisionConfig(recipe="fp8_delayed", fp8_param_gather=True), ("hybrid", "delayed", True, False)),
    ],
)
def test_megatron_takes_the_recipes(hf, precision, expected):
    arguments = precision_arguments(precision, OptimizerConfig(lr=1e-3), experts=False)
    config = build.transformer_config(read_model(hf), ParallelConfig(), BF16, **arguments.transformer)
    assert (config.fp8, config.fp8_recipe, config.fp8_param, config.first_last_layers_bf16) == expected
    assert config.num_layers_at_start_in_bf16 == precision.bf16_layers_at_start
    assert config.num_layers_at_end_in_bf16 == precision.bf16_layers_at_end
    gathering = DistributedDataParallelConfig(use_distributed_optimizer=True, **arguments.gradients)
    assert gathering.fp8_param_gather == precision.fp8_param_gather
    told = MegatronOptimizerConfig(use_distributed_optimizer=True, **arguments.optimizer)
    assert told.fp8_recipe == (expected[1] if precision.fp8_param_gather else None)


def test_layers_out_of_fp8_are_those_of_the_configuration(hf):
    model = dataclasses.replace(read_model(hf), layers=6)
    precision = PrecisionConfig(recipe="fp8_blockwise", bf16_layers_at_start=2, bf16_layers_at_end=1)
    arguments = precision_arguments(precision, OptimizerConfig(lr=1e-3), experts=False)
    config = build.transformer_config(model, ParallelConfig(), BF16, **arguments.transformer)
    out = [layer for layer in range(6) if fp8_utils.is_first_last_bf16_layer(config, layer)]
    assert out == [0, 1, 5]


def test_interleaved_stages_do_not_batch_what_they_send(hf, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "has_transformer_engine", lambda: False)
    model = dataclasses.replace(read_model(hf), layers=4)
    for layout, batched in ((ParallelConfig(pipeline=2), True), (ParallelConfig(pipeline=2, virtual=2), False)):
        config = build.transformer_config(model, layout, BF16)
        assert (config.batch_p2p_comm, config.overlap_p2p_comm) == (batched, False)


def test_experts_are_padded_for_fp8_alone():
    asked = "moe_router_padding_for_quantization"
    for recipe, experts, padded in (
        ("model_dtype", True, False),
        ("fp8_blockwise", True, True),
        ("fp8_delayed", False, False),
    ):
        arguments = precision_arguments(PrecisionConfig(recipe=recipe), OptimizerConfig(lr=1e-3), experts)
        assert arguments.transformer.get(asked, False) == padded


class Fp8(nn.Parameter):
    """A parameter that rounds what it is given, as Transformer Engine's FP8 tensors do."""

    def copy_(self, values):
        return super().copy_(values.to(torch.float8_e4m3fn).to(self.dtype))


def test_fp8_weights_keep_what_they_were_filled_with(monkeypatch):
    monkeypatch.setattr(fp8_utils, "is_float8tensor", lambda tensor: isinstance(tensor, Fp8))
    chunk = nn.Module()
    chunk.inner = nn.Linear(4, 3, dtype=BF16)
    weight = chunk.inner.weight = Fp8(torch.zeros(3, 4, dtype=BF16))
    weight._high_precision_init_val = torch.full((3, 4), 7.0)
    bias, values = chunk.inner.bias, torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(BF16)
    with filled_in_full([chunk], BF16):
        assert chunk.inner.weight is not weight and chunk.inner.bias is bias
        chunk.inner.weight.data.copy_(values)
    assert chunk.inner.weight is weight
    assert torch.equal(weight._high_precision_init_val, values)
    assert torch.equal(weight, values.to(torch.float8_e4m3fn).to(BF16)) and not torch.equal(weight, values)
    with pytest.raises(ValueError, match="stop"), filled_in_full([chunk], BF16):
        raise ValueError("stop")
    assert chunk.inner.weight is weight


def test_fp8_blocks_are_scaled_as_those_of_checkpoints():
    import os

    assert os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
