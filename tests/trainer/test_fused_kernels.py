"""Which of Megatron's fused kernels a model gets on which machine, and that they compute the same."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.moe import fused_a2a
from policy_fixtures import make_batch, make_config, write_config
from tiny_configs import raw_config

from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AlgorithmConfig, Config, ParallelConfig
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.platform.megatron.layers import SwiGLU
from megatron_fleet.trainer.megatron import build, routing
from megatron_fleet.trainer.megatron import policy as policy_module
from megatron_fleet.trainer.megatron.policy import MegatronPolicy

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = rope_utils._apply_rotary_pos_emb_thd


def rotated(t, cu_seqlens, freqs, cp_size=1, cp_rank=0, interleaved=False):
    """Transformer Engine's kernel for packed sequences, which has no argument for YaRN's factor."""

    class Ranks:
        size, rank = (lambda _: cp_size), (lambda _: cp_rank)

    assert not interleaved
    return PLAIN(t, cu_seqlens, freqs, cp_group=Ranks())


@pytest.fixture
def engine(monkeypatch):
    """Settings for Transformer Engine on a CUDA device."""
    monkeypatch.setattr(build, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", rotated)


def model_of(tmp_path, **changes):
    return read_model(json.loads((write_config(tmp_path / "model", **changes) / "config.json").read_text()))


def settings(model):
    more = {"moe_permute_fusion": False}  # Megatron looks for the kernel
    return build.transformer_config(model, ParallelConfig(), torch.bfloat16, **more)


@pytest.mark.parametrize(
    ("cuda", "has_engine", "expected"),
    [(False, False, (False, True)), (True, False, (True, False)), (True, True, (True, False))],
)
def test_swiglu_is_megatrons_on_cuda_devices(tmp_path, monkeypatch, cuda, has_engine, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(build, "has_transformer_engine", lambda: has_engine)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", rotated)
    config = settings(model_of(tmp_path))
    assert (config.bias_activation_fusion, config.use_te_activation_func) == expected
    gelu = settings(dataclasses.replace(model_of(tmp_path), activation="gelu_tanh"))
    assert (gelu.bias_activation_fusion, gelu.use_te_activation_func) == (False, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_megatrons_swiglu_is_ours(dtype):
    generator = torch.Generator().manual_seed(0)
    x, up = torch.randn(5, 1, 12, generator=generator).to(dtype), torch.randn(5, 1, 6, generator=generator).to(dtype)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    found = []
    for function in (SwiGLU(), lambda y: bias_swiglu_impl(y, None)):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        out.backward(up)
        found.append((out.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0], **close)
    weights = torch.rand(5, 1, generator=generator)
    scaled = weighted_bias_swiglu_impl(x[:, 0], None, weights)
    assert scaled.dtype == dtype
    torch.testing.assert_close(scaled, (SwiGLU()(x[:, 0]) * weights).to(dtype), **close)


def test_megatrons_swiglu_keeps_its_input_alone():
    kept = []
    x = torch.randn(4, 1, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bias_swiglu_impl(x, None)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_rotary_embedding_is_fused_where_the_kernel_fits(tmp_path, engine, monkeypatch, family):
    plain = model_of(tmp_path) if family == "qwen3" else read_model(raw_config("deepseek_v3", "v5"))
    without = dataclasses.replace(plain, rope=dataclasses.replace(plain.rope, kind="default"))
    config = settings(without)
    assert (config.apply_rope_fusion, config.softmax_scale) == (family == "qwen3", None)
    if family == "deepseek_v3":
        assert plain.rope.kind == "yarn" and settings(plain).apply_rope_fusion
        assert settings(plain).softmax_scale is None  # its kernel has the factor
    monkeypatch.setattr(build, "has_transformer_engine", lambda: False)
    assert not settings(without).apply_rope_fusion


def test_yarns_factor_moves_into_the_softmax(tmp_path, engine):
    config = settings(model_of(tmp_path, rope_scaling=YARN))
    factor = 0.1 * math.log(4) + 1
    assert config.apply_rope_fusion
    assert _yarn_get_concentration_factor_from_config(config) == pytest.approx(factor)
    assert config.softmax_scale == pytest.approx(factor**2 / math.sqrt(32))


def test_yarn_through_the_fused_kernel_gives_the_same_log_probs(tmp_path, monkeypatch):
    folder = write_config(tmp_path / "model", rope_scaling=YARN, max_position_embeddings=256)
    batch, found = make_batch(count=4, longest=120), []
    calls = []
    for fused in (False, True):
        if fused:
            monkeypatch.setattr(build, "has_transformer_engine", lambda: True)
            stand_in = lambda *a, **k: calls.append(1) or rotated(*a, **k)  # noqa: E731
            monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", stand_in)
        policy = MegatronPolicy(make_config(folder), init="random")
        found.append(policy.forward([batch[:1], batch[1:]]))
        assert policy.model_chunks[0].config.apply_rope_fusion == fused
        policy.close()
    assert len(calls) == 2 * 4 * 2  # query and key, layers, micro-batches
    for plain, other in zip(found[0], found[1], strict=True):
        for one, two in zip(plain, other, strict=True):
            torch.testing.assert_close(torch.from_numpy(two), torch.from_numpy(one), rtol=1e-5, atol=1e-5)


ALL_TO_ALL, DEEPEP = ("alltoall", "deepep"), ("flex", "deepep")


def expert_arguments(tree):
    config = Config.model_validate(tree)
    return routing.expert_arguments(config.model, config.policy, config.parallel)


@pytest.mark.parametrize(
    ("asked", "installed", "layout", "changes", "expected"),
    [
        ("auto", True, {"data": 8, "expert": 8}, {}, DEEPEP),
        ("auto", False, {"data": 8, "expert": 8}, {}, ALL_TO_ALL),
        ("auto", True, {"data": 8}, {}, ALL_TO_ALL),
        ("auto", True, {"data": 3, "expert": 3}, {}, ALL_TO_ALL),
        ("auto", True, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2}, {}, DEEPEP),
        ("auto", True, {"data": 8, "expert": 8}, {"model": {"dtype": "float32"}}, ALL_TO_ALL),
        ("auto", True, {"data": 8, "expert": 8}, {"router": {"dtype": "float64"}}, ALL_TO_ALL),
        ("alltoall", True, {"data": 8, "expert": 8}, {}, ALL_TO_ALL),
        ("deepep", True, {"data": 8, "expert": 8}, {}, DEEPEP),
    ],
)
def test_tokens_go_through_deepep_where_it_is_installed(
    tmp_path, monkeypatch, asked, installed, layout, changes, expected
):
    monkeypatch.setattr(fused_a2a, "fused_dispatch", object() if installed else None)
    parallel = ParallelConfig(**layout)
    tree = make_config(tmp_path, parallel, dtype="bfloat16").model_dump()
    tree["model"] |= changes.get("model", {})
    tree["policy"]["router"] |= {"dispatcher": asked} | changes.get("router", {})
    arguments = expert_arguments(tree)
    model = dataclasses.replace(read_model(raw_config("qwen3_moe", "v5")), experts=24)
    config = build.transformer_config(model, parallel, torch.bfloat16, **arguments)
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == expected


def test_deepep_that_is_missing_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_a2a, "fused_dispatch", None)
    tree = make_config(tmp_path, ParallelConfig(data=2, expert=2), dtype="bfloat16").model_dump()
    tree["policy"]["router"]["dispatcher"] = "deepep"
    with pytest.raises(UserError, match=r"dispatcher=deepep .* deep_ep, .* policy.router.dispatcher=auto"):
        expert_arguments(tree)


def test_a_policy_tells_layers_whether_a_pass_adds_to_gradients_and_which_are_observed(tmp_path, monkeypatch):
    told = []

    class Switch:
        def __init__(self, chunks, unsuitable, overwrites):
            told.append(overwrites)

        def start(self, observed, again):
            told.append((len(observed) > 0, again))

    monkeypatch.setattr(policy_module, "FusedWeightGradients", Switch)
    tree = make_config(write_config(tmp_path / "model")).model_dump()
    tree["policy"]["gradient_metrics"] = {"every": 2, "parameters": 4}
    policy = MegatronPolicy(Config.model_validate(tree), init="random")
    batch, loss = make_batch(count=2, longest=40), make_loss(AlgorithmConfig())
    for after in (None, lambda: policy.optim_step(1e-3), policy.discard_gradients, None):
        policy.forward_backward([batch], loss)
        if after is not None:
            after()
    policy.close()
    assert told == [False, (True, False), (True, True), (False, False), (True, False)]
