"""Computed activations are the tensors that a pass of the real model keeps, byte for byte.

Measured on CPU with PyTorch's layers: each storage that autograd saves counts once, parameters do not.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from policy_fixtures import make_batch, write_config

from megatron_fleet.config.schema import ParallelConfig
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.planning.memory.activations import (
    TrainingPass,
    chunk_bytes,
    chunks_in_flight,
    layer_kept,
    layer_saved,
    layer_working,
)
from megatron_fleet.trainer.megatron import build, parallel, step
from megatron_fleet.trainer.packing.pack import pack_micro_batch

SHAPE = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 24}
QWEN2 = {"model_type": "qwen2", "hidden_size": 96, "intermediate_size": 112, "head_dim": None}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    parallel.initialise(ParallelConfig(), 0)
    yield
    parallel.shutdown()


def measured(folder, changes, layers, recompute="none") -> tuple[int, int]:
    """Bytes that autograd saves in the forward pass of a micro-batch, and its tokens."""
    path = write_config(folder, **(SHAPE | changes | {"num_hidden_layers": layers})) / "config.json"
    hf = {name: value for name, value in json.loads(path.read_text()).items() if value is not None}
    batch = make_batch(2, 511, 90)
    width = sum(map(len, batch))
    (chunk,) = build.build_chunks(hf, ParallelConfig(), torch.bfloat16, width, recompute)
    build.fill_random([chunk], 0.06, 5, 511)
    own = {t.untyped_storage()._cdata for t in (*chunk.parameters(), *chunk.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved.setdefault(storage._cdata, storage)  # alive, so that no address is used twice
        return tensor

    micro_batch = pack_micro_batch(batch, width, 1)
    inputs = step.model_inputs(micro_batch, chunk, step.Settings(1.0, 50), torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk(**inputs)
    # At the end: what will be recomputed is saved and then emptied.
    return sum(storage.nbytes() for key, storage in saved.items() if key not in own), width


def model_of(changes):
    hf = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    hf |= {"rms_norm_eps": 1e-6, "vocab_size": 511, "rope_theta": 1e4} | SHAPE | changes
    return read_model({name: value for name, value in hf.items() if value is not None})


def of_a_layer(folder, changes, recompute="none") -> tuple[int, TrainingPass]:
    """Measured bytes of one layer more, and the description of the pass."""
    two, width = measured(folder, changes, 2, recompute)
    three, _ = measured(folder, changes, 3, recompute)
    given = {"model": model_of(changes), "parallel": ParallelConfig(), "tokens": width, "recompute": recompute}
    return three - two, TrainingPass(torch_layers=True, **given)


@pytest.mark.parametrize("changes", [{}, QWEN2], ids=["norms of query and key", "without"])
def test_a_dense_layer_keeps_what_was_computed(tmp_path, changes):
    found, of = of_a_layer(tmp_path, changes)
    assert layer_kept(of, 0) == sum(layer_saved(of, 0).values()) == found


def test_a_layer_of_experts_keeps_what_was_computed(tmp_path):
    found, of = of_a_layer(tmp_path, EXPERTS)
    saved = layer_saved(of, 0)
    # The computed router is that of Transformer Engine's fused permutation; PyTorch's keeps less.
    small = 40 * of.model.experts_per_token * of.tokens
    assert 0 <= found - sum(nbytes for name, nbytes in saved.items() if name != "router") <= small


def test_full_recomputation_keeps_the_input_of_a_layer(tmp_path):
    found, of = of_a_layer(tmp_path, {}, "full")
    assert layer_kept(of, 0) == found == 2 * of.model.hidden * of.tokens


def test_some_recomputed_layers_keep_their_input(tmp_path):
    one, tokens = measured(tmp_path, {}, 3, 1)
    two, _ = measured(tmp_path, {}, 3, 2)
    four, _ = measured(tmp_path, {}, 4, 1)

    def kept(layers: int, recompute: int) -> int:
        of = TrainingPass(
            model=model_of({}), parallel=ParallelConfig(), tokens=tokens, recompute=recompute, torch_layers=True
        )
        return chunk_bytes(of, range(layers))[0]

    assert one - two == kept(3, 1) - kept(3, 2) > 0
    assert four - one == kept(4, 1) - kept(3, 1) > 0


@pytest.mark.parametrize("part", ["mlp", "layernorm"])
def test_named_parts_are_recomputed(tmp_path, part):
    found, of = of_a_layer(tmp_path, {}, (part,))
    assert layer_kept(of, 0) == found


def gpu(model, layout, **changes):
    return TrainingPass(model=model, parallel=layout, tokens=32768, **changes)


def test_qwen3_8b_on_gpus():
    """The formulas of the module's table by hand: 140 KB per token and layer on one rank, 8 KB recomputed."""
    h, f, q, kv, tokens = 4096, 12288, 4096, 1024, 32768
    model = model_of({"hidden_size": h, "intermediate_size": f, "head_dim": 128} | HEADS)
    for tensor in (1, 2, 4):
        of = gpu(model, ParallelConfig(tensor=tensor))
        per_token = 8 * h + 6 * f + 2 * (4 * q + 3 * kv)
        small = 8 + 4 * 32 + 4 * (32 + 8)  # statistics of norms and soft-max
        assert sum(layer_saved(of, 0).values()) == (per_token + small) * tokens // tensor
        of = gpu(model, ParallelConfig(tensor=tensor), recompute="full")
        assert layer_kept(of, 0) == 2 * h * tokens // tensor
        again = (per_token + small - 2 * h) * tokens // tensor
        assert layer_working(of, 0) == again + (6 * f // tensor + 4 * h) * tokens
    whole = gpu(model, ParallelConfig(tensor=2, sequence=False))
    assert layer_saved(whole, 0)["residual"] == 2 * layer_saved(gpu(model, ParallelConfig(tensor=2)), 0)["residual"]
    halved = gpu(model, ParallelConfig(tensor=2, context=2))
    assert 2 * sum(layer_saved(halved, 0).values()) == sum(
        layer_saved(gpu(model, ParallelConfig(tensor=2)), 0).values()
    )


def test_activations_of_later_layers_are_free_when_earlier_ones_are_recomputed():
    model = model_of({"hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128} | HEADS)
    passes = {some: gpu(model, ParallelConfig(), recompute=some) for some in ("none", 1, 3, 4, "full")}
    kept, working = ({some: chunk_bytes(of, range(4))[n] for some, of in passes.items()} for n in (0, 1))
    layer, own_input = layer_kept(passes["none"], 0), layer_kept(passes["full"], 0)
    assert kept == {"none": 4 * layer, 1: own_input + 3 * layer, 3: 3 * own_input + layer} | dict.fromkeys(
        (4, "full"), 4 * own_input
    )
    again = layer - own_input
    assert working == dict.fromkeys(("none", 1, 3), working["none"]) | dict.fromkeys(
        (4, "full"), working["none"] + again
    )


HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}


def test_experts_of_the_busiest_rank():
    model = model_of(EXPERTS | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768} | HEADS)
    even = layer_saved(gpu(model, ParallelConfig(data=8, expert=8)), 0)
    assert even["dispatched"] + even["expert gate and up"] + even["expert activated"] == 32768 * 8 * (2 * 64 + 6 * 768)
    uneven = layer_saved(gpu(model, ParallelConfig(data=8, expert=8), imbalance=1.5), 0)
    assert uneven["dispatched"] == 1.5 * even["dispatched"] and uneven["residual"] == even["residual"]


def test_norms_inside_of_linear_layers_are_not_recomputed():
    dense, experts = (gpu(model_of(changes), ParallelConfig(), recompute=("layernorm",)) for changes in ({}, EXPERTS))
    norm = (2 * 64 + 4) * 32768
    assert layer_kept(dense, 0) == sum(layer_saved(dense, 0).values())
    assert layer_kept(experts, 0) == sum(layer_saved(experts, 0).values()) - norm


def test_fp8_keeps_inputs_of_linear_layers_in_one_byte():
    model = model_of({})
    plain, fp8 = (layer_saved(gpu(model, ParallelConfig(), fp8=x), 0) for x in (False, True))
    assert fp8["activated"] * 2 == plain["activated"] and fp8["gate and up"] == plain["gate and up"]
    assert fp8["projection input"] == 32768 * 4 * 24


@pytest.mark.parametrize(
    ("layout", "stage", "micro_batches", "expected"),
    [
        ({}, 0, 8, 1),
        ({"pipeline": 4}, 0, 8, 4),
        ({"pipeline": 4}, 3, 8, 1),
        ({"pipeline": 4}, 0, 2, 2),
        ({"pipeline": 4, "virtual": 5}, 0, 16, 23),
        ({"pipeline": 4, "virtual": 5}, 3, 16, 17),
    ],
)
def test_passes_in_flight_of_a_pipeline_stage(layout, stage, micro_batches, expected):
    assert chunks_in_flight(ParallelConfig(**layout), stage, micro_batches) == expected
