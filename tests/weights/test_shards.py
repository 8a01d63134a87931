"""HF folder → Megatron shards, against an independent way of sharding."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from weight_fixtures import random_tensors, stage_chunks, tiny_config, write_folder  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.weights.shards import load_hf  # noqa: E402

pytestmark = pytest.mark.usefixtures("groups")


def reference_shard(config, tensors, key, layer, tp_rank, tp_size, rows):
    """The same parameter by whole-tensor reshaping: group-wise concatenation, then a split."""
    hf = f"model.layers.{layer}."

    def part(t, axis):
        return t.chunk(tp_size, axis)[tp_rank]

    def vocabulary(t):
        padded = torch.zeros(rows * tp_size, t.shape[1])
        padded[: len(t)] = t
        return part(padded, 0)

    norms = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
        "self_attention.q_layernorm.weight": "self_attn.q_norm",
        "self_attention.k_layernorm.weight": "self_attn.k_norm",
    }
    if key in norms:
        return tensors[f"{hf}{norms[key]}.weight"]
    if key == "self_attention.linear_qkv.weight":
        groups = config["num_key_value_heads"]
        split = [tensors[f"{hf}self_attn.{x}_proj.weight"].unflatten(0, (groups, -1)) for x in "qkv"]
        return part(torch.cat(split, 1).flatten(0, 1), 0)
    if key == "mlp.linear_fc1.weight":
        return torch.cat([part(tensors[f"{hf}mlp.{x}_proj.weight"], 0) for x in ("gate", "up")])
    if key == "self_attention.linear_proj.weight":
        return part(tensors[f"{hf}self_attn.o_proj.weight"], 1)
    if key == "mlp.linear_fc2.weight":
        return part(tensors[f"{hf}mlp.down_proj.weight"], 1)
    if key == "decoder.final_layernorm.weight":
        return tensors["model.norm.weight"]
    return vocabulary(tensors["lm_head.weight" if key == "output_layer.weight" else "model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_shards_equal_the_reference(tmp_path, tp_size, pp_size, tied):
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors, files=3 if pp_size == 2 else 1)
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            (chunk,) = chunks = stage_chunks(config, (tp_rank, tp_size), pp_rank, pp_size)
            load_hf(chunks, folder)
            for key, layer, p in chunk.described():
                expected = reference_shard(config, tensors, key, layer, tp_rank, tp_size, p.shape[0])
                assert torch.equal(p, expected), key


def test_several_chunks_of_one_rank_keep_their_layers(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)
    chunks = stage_chunks(config, (0, 1), 0, 4) + stage_chunks(config, (0, 1), 2, 4)
    load_hf(chunks, folder)
    assert torch.equal(chunks[1].of("mlp.linear_fc2.weight", 2), tensors["model.layers.2.mlp.down_proj.weight"])


def test_casts_to_the_parameters_dtype(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config, torch.bfloat16)
    folder = write_folder(tmp_path / "hf", config, tensors)
    (chunk,) = chunks = stage_chunks(config, (0, 1), 0, 1)
    load_hf(chunks, folder)
    norm = chunk.of("decoder.final_layernorm.weight")
    assert norm.dtype == torch.float32
    assert torch.equal(norm, tensors["model.norm.weight"].float())


def test_ranks_read_their_own_rows(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)
    whole = load_hf(stage_chunks(config, (0, 1), 0, 1), folder)
    assert whole == sum(t.nbytes for t in tensors.values())
    split_by_columns = sum(t.nbytes for n, t in tensors.items() if "o_proj" in n or "down_proj" in n)
    norms = sum(t.nbytes for n, t in tensors.items() if t.dim() == 1)
    part = load_hf(stage_chunks(config, (1, 2), 0, 1), folder)
    row = config["hidden_size"] * 4
    padding = 2 * 5 * row  # the second rank has the shorter part of the padded vocabulary, twice
    assert part == (whole - split_by_columns - norms) // 2 + split_by_columns + norms - padding // 2


def test_a_broken_folder_is_refused_before_anything_changes(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config) | {"model.layers.1.mlp.up_proj.weight": torch.zeros(40, 32)}
    folder = write_folder(tmp_path / "hf", config, tensors)
    chunks = stage_chunks(config, (0, 1), 0, 1)
    with pytest.raises(UserError, match=r"up_proj.weight has shape \[40, 32\]; config.json asks for \[48, 32\]"):
        load_hf(chunks, folder)
    assert all(p.isnan().all() for p in chunks[0].parameters())


def test_a_model_of_another_config_is_refused(tmp_path):
    folder = write_folder(tmp_path / "hf", tiny_config(), random_tensors(tiny_config()))
    chunks = stage_chunks(tiny_config(intermediate_size=64), (0, 1), 0, 1)
    with pytest.raises(UserError, match=r"linear_fc1.weight has shape \[128, 32\]; config.json asks for \[96, 32\]"):
        load_hf(chunks, folder)
    assert all(p.isnan().all() for p in chunks[0].parameters())
