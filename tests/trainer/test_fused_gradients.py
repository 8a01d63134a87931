"""Weight gradients that layers add to Megatron's buffers, with a stand-in for Transformer Engine's layers."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from policy_fixtures import make_batch, write_config
from torch import nn

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.schema import AlgorithmConfig, OptimizerConfig, ParallelConfig, PrecisionConfig
from megatron_fleet.trainer.megatron import build, optimizer, parallel, step
from megatron_fleet.trainer.megatron.fused_gradients import FusedWeightGradients
from megatron_fleet.trainer.megatron.offload import TrainState
from megatron_fleet.trainer.megatron.precision import precision_arguments
from megatron_fleet.trainer.packing.pack import pack_micro_batch

SIZE, PASSES, MICRO_BATCHES = 8, 2, 3


class Product(torch.autograd.Function):
    """A product that treats its weight's gradient as Transformer Engine 2.11 and 2.20 do."""

    @staticmethod
    def forward(ctx, x, weight, fused, first):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fused, ctx.first = weight, fused, first
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, values = ctx.saved_tensors
        of_weight = grad.t() @ x
        if ctx.fused:
            into = ctx.weight.main_grad
            into.copy_(of_weight if ctx.first else into + of_weight)
            ctx.weight.grad_added_to_main_grad = True
            of_weight = torch.full_like(values, float("nan"))  # without content
        return grad @ values, of_weight, None, None


class Layer(nn.Module):
    """A linear layer of Transformer Engine."""

    def __init__(self, fp8: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.layer_norm_weight = nn.Parameter(torch.ones(SIZE))
        self.fuse_wgrad_accumulation, self.fp8, self.is_first = False, fp8, False
        self.passes: list[bool] = []

    def forward(self, x):
        first, self.is_first = self.is_first and self.fp8, False
        self.passes.append(self.fuse_wgrad_accumulation)
        return Product.apply(x * self.layer_norm_weight, self.weight, self.fuse_wgrad_accumulation, first)


class Chunk(nn.Module):
    def __init__(self, fp8: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(fp8), Layer(fp8)])
        self.out = nn.Linear(SIZE, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@pytest.fixture(scope="module", autouse=True)
def _groups():
    parallel.initialise(ParallelConfig(), 0)
    yield
    parallel.shutdown()


def wrapped(fp8: bool):
    config = TransformerConfig(
        num_layers=2, hidden_size=SIZE, num_attention_heads=1, calculate_per_token_loss=True, params_dtype=torch.float32
    )
    chunk = Chunk(fp8)
    chunk.config = config
    return optimizer.wrap(chunk)


def gradients(ddp, switch, observed=()):
    """Accumulated over several passes of several micro-batches."""
    generator = torch.Generator().manual_seed(1)
    for number in range(PASSES):
        if switch is not None:
            switch.start(observed if number == 0 else (), again=number > 0)
        for layer in ddp.module.layers:
            layer.is_first = True
        for _ in range(MICRO_BATCHES):
            ddp.module(torch.randn(4, SIZE, generator=generator)).sum().backward()
    return {name: p.main_grad.clone() for name, p in ddp.module.named_parameters()}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("observed", [False, True])
def test_gradients_are_those_without_fusion(fp8, observed):
    expected = gradients(wrapped(fp8), None)
    ddp = wrapped(fp8)
    switch = FusedWeightGradients([ddp], {}, overwrites=fp8)
    first, second = ddp.module.layers
    seen = []
    if observed:
        first.weight.register_hook(seen.append)
    for _ in range(2):  # and after the buffers were cleared
        found = gradients(ddp, switch, [first.weight] if observed else ())
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name)
        ddp.zero_grad_buffer()
    # FP8's second pass would overwrite the first.
    again = [not fp8] * MICRO_BATCHES
    assert second.passes == 2 * ([True] * MICRO_BATCHES + again)
    assert first.passes == 2 * ([not observed] * MICRO_BATCHES + again)
    if observed:
        assert all(torch.isfinite(gradient).all() for gradient in seen[:MICRO_BATCHES])


def test_layers_that_compute_with_other_tensors_or_are_frozen_are_left_alone():
    ddp = wrapped(False)
    first, second = ddp.module.layers
    del second.weight.main_grad
    FusedWeightGradients([ddp], {first.weight: None}, overwrites=False).start((), again=False)
    assert (first.fuse_wgrad_accumulation, second.fuse_wgrad_accumulation) == (False, False)
    FusedWeightGradients([ddp], {}, overwrites=False).start((), again=False)
    assert (first.fuse_wgrad_accumulation, second.fuse_wgrad_accumulation) == (True, False)


def test_gradients_without_content_leave_the_device_too(monkeypatch):
    engine = SimpleNamespace(_dummy_wgrads={(4, 4): torch.empty(4, 4)})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", engine)
    state = object.__new__(TrainState)
    state._away, state._device = {}, torch.device("cpu")
    state._drop_workspaces()
    assert engine._dummy_wgrads == {}


def test_memory_that_engines_have_released_leaves_the_device(monkeypatch):
    """vLLM asks for it before our engines close the mapping; afterwards nobody would."""
    state, order = object.__new__(TrainState), []
    state._away, state._device = {}, torch.device("cuda", 0)
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: order.append(name))
    state._drop_workspaces()
    assert order == ["ipc_collect", "empty_cache"]


def model_gradients(hf, precision, fused):
    """Gradients of a whole model over two passes, and which layers' switches were on in the first."""
    arguments = precision_arguments(precision, OptimizerConfig(lr=1e-3), experts=False)
    chunks = build.build_chunks(hf, ParallelConfig(), torch.bfloat16, 512, **arguments.transformer)
    build.fill_random(chunks, 0.06, 5, hf["vocab_size"])
    ddp = [optimizer.wrap(chunk, arguments.gradients) for chunk in chunks]
    switch, batch = FusedWeightGradients(ddp, {}, overwrites=precision.fp8), make_batch(8, vocab_size=hf["vocab_size"])
    packed = [pack_micro_batch(part, 512, 1) for part in (batch[:3], batch[3:5], batch[5:])]
    on = []
    for number in range(PASSES):
        if fused:
            switch.start((), again=number > 0)
        on.append([m.fuse_wgrad_accumulation for m in ddp[0].modules() if hasattr(m, "fuse_wgrad_accumulation")])
        step.run_loss(ddp, packed, step.Settings(1.0, 512), make_loss(AlgorithmConfig()))
    return {name: p.main_grad.clone() for name, p in chunks[0].named_parameters()}, on[0]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["model_dtype", "fp8_tensorwise"])
def test_transformer_engines_own_layers_add_the_same(tmp_path, recipe):
    pytest.importorskip("transformer_engine.pytorch")
    if recipe != "model_dtype" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512, "num_hidden_layers": 2}
    hf = json.loads((write_config(tmp_path, **sizes) / "config.json").read_text())
    precision = PrecisionConfig(recipe=recipe)
    expected, off = model_gradients(hf, precision, fused=False)
    found, on = model_gradients(hf, precision, fused=True)
    assert len(on) == 2 * 4 and all(on) and not any(off)
    for name, value in expected.items():
        difference = torch.linalg.vector_norm(found[name] - value) / torch.linalg.vector_norm(value)
        assert difference < 0.02, name
