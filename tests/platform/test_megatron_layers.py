"""Latent attention, experts and pipeline stages on a host without CUDA: every layout computes the same."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import layer_ranks
import torch

WORLD = 4
Results = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    """Measurements of each rank; one launch, because imports dominate."""
    folder = tmp_path_factory.mktemp("layers")
    run_ranks(Path(__file__).with_name("layer_ranks.py"), WORLD, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def assemble(results: Results, model: str, layout: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits ``[micro-batches, T, V]`` and whole gradients by checkpoint key; copies on several ranks must agree."""
    logits: dict[int, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for rank in results:
        logits |= rank[model, layout]["logits"]
        for key, shape, place, data in rank[model, layout]["gradients"]:
            known = whole.setdefault(key, torch.full(shape, float("nan")))
            data = data.reshape(known[place].shape)
            if not known[place].isnan().any():
                torch.testing.assert_close(known[place], data, rtol=1e-4, atol=1e-5)
            known[place] = data
    assert not [key for key, tensor in whole.items() if tensor.isnan().any()]
    used = sum(layer_ranks.LENGTHS)
    return torch.stack([logits[k][:used] for k in range(layer_ranks.MICRO_BATCHES)]), whole


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), [job for job in layer_ranks.JOBS if job[1] != "data 4"])
def test_every_layout_computes_the_same(results, model, layout):
    logits, gradients = assemble(results, model, layout)
    expected_logits, expected = assemble(results, model, "data 4")
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.any(), key
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@pytest.mark.slow
def test_checkpoints_have_transformer_engines_keys(results):
    keys = {model: set(assemble(results, model, "data 4")[1]) for model in layer_ranks.MODELS}
    ends = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    grouped = "self_attention.linear_qkv.{weight,bias,layer_norm_weight} self_attention.linear_proj.weight"
    normed = "self_attention.{q,k}_layernorm.weight"
    latent = "input_layernorm.weight self_attention.linear_kv_down_proj.weight self_attention.linear_proj.weight"
    latent += " self_attention.linear_kv_up_proj.{weight,layer_norm_weight}"
    query = "self_attention.linear_q_down_proj.weight self_attention.linear_q_up_proj.{weight,layer_norm_weight}"
    dense = "mlp.linear_fc1.{weight,layer_norm_weight} mlp.linear_fc2.weight"
    sparse = "pre_mlp_layernorm.weight mlp.router.weight mlp.experts.experts.linear_{fc1,fc2}.weight"
    shared = "mlp.shared_experts.linear_{fc1,fc2}.weight"

    def layer(prefix: str, *parts: str) -> set[str]:
        names = set()
        for name in " ".join(parts).split():
            choices = re.search(r"\{(.*)\}", name)
            for choice in choices[1].split(",") if choices else [""]:
                names.add(prefix + re.sub(r"\{.*\}", choice, name))
        return names

    # A list of layer kinds makes Megatron number the layers; otherwise they are stacked under one key.
    assert keys["grouped"] == ends | layer("decoder.layers.", grouped, normed, sparse)
    assert keys["without norms"] == ends | layer("decoder.layers.", grouped, dense)
    plain = layer("decoder.layers.", latent, "self_attention.linear_q_proj.weight", dense)
    assert keys["latent without query rank"] == ends | plain
    layers = [layer("decoder.layers.0.", latent, query, dense)]
    layers += [layer(f"decoder.layers.{i}.", latent, query, sparse, shared) for i in (1, 2, 3)]
    assert keys["latent"] == ends.union(*layers)


@pytest.mark.slow
def test_collectives_take_parts_of_different_sizes(results):
    sizes = [3, 0, 1, 2]
    gathered = torch.cat([torch.full((n, 2), float(rank)) for rank, n in enumerate(sizes)])
    scattered = (torch.arange(12.0).view(6, 2) * 1111).split(sizes)
    for rank, got in enumerate(r["uneven"] for r in results):
        assert torch.equal(got["gathered"], gathered) and torch.equal(got["scattered"], scattered[rank])


def test_value_heads_may_be_narrower_than_keys():
    from megatron_fleet.platform.megatron.attention import MicroBatchParams, PackedAttention

    torch.manual_seed(0)
    q, k, v = torch.randn(8, 3, 10), torch.randn(8, 3, 10), torch.randn(8, 3, 4)
    core = PackedAttention(SimpleNamespace(context_parallel_size=1), 1, softmax_scale=0.5)
    out = core(q, k, v, packed_seq_params=MicroBatchParams(lengths=(5, 2), filler=1))
    assert out.shape == (8, 12) and not out[7:].any()
    for piece in (slice(0, 5), slice(5, 7)):
        scores = torch.einsum("qhd,khd->hqk", q[piece], k[piece]) * 0.5
        n = scores.shape[-1]
        weights = scores.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v[piece]).reshape(n, -1)
        torch.testing.assert_close(out[piece], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])]
)
def test_which_layers_have_experts(frequency, expected):
    from megatron_fleet.platform.megatron.spec import has_experts

    config = SimpleNamespace(num_moe_experts=4, moe_layer_freq=frequency)
    assert [has_experts(config, layer) for layer in range(4)] == [bool(n) for n in expected]
    assert not has_experts(SimpleNamespace(num_moe_experts=None, moe_layer_freq=frequency), 1)


def linear_config(**changes: Any) -> SimpleNamespace:
    settings = {"params_dtype": torch.float32, "perform_initialization": True, "sequence_parallel": True}
    return SimpleNamespace(**(settings | {"tensor_model_parallel_size": 2} | changes))


def test_the_duplicated_layer_refuses_what_it_would_get_wrong():
    from megatron_fleet.platform.megatron.layers import DuplicatedLinear

    with pytest.raises(ValueError, match="sequence_parallel"):
        DuplicatedLinear(3, 2, config=linear_config(sequence_parallel=False), init_method=lambda w: w, bias=False)
    with pytest.raises(ValueError, match="bias"):
        DuplicatedLinear(3, 2, config=linear_config(), init_method=lambda w: w, bias=True)
    layer = DuplicatedLinear(3, 2, config=linear_config(), init_method=torch.nn.init.ones_, bias=False)
    assert layer.weight.sequence_parallel and not hasattr(layer.weight, "tensor_model_parallel")
    assert torch.equal(layer(torch.ones(5, 1, 3))[0], torch.full((5, 1, 2), 3.0))


def test_padding_counts_for_no_expert():
    from megatron.core.transformer.moe.router import TopKRouter

    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
    chosen = torch.tensor([[True, False], [True, True], [False, True]])
    TopKRouter._apply_expert_bias(router, chosen, padding_mask=torch.tensor([False, True, False]))
    assert router.local_tokens_per_expert.tolist() == [1, 1]
    TopKRouter._apply_expert_bias(router, chosen)
    assert router.local_tokens_per_expert.tolist() == [3, 3]
