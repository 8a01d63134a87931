"""HF folder → Megatron shards, against an independent way of sharding."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from weight_fixtures import random_tensors, stage_chunks, tiny_config, write_folder  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.weights.hf_folder import check_hf_folder  # noqa: E402
from megatron_fleet.weights.load import global_parameters, load_hf  # noqa: E402


def reference_shard(config, tensors, name, tp_rank, tp_size, rows):
    """The same parameter by whole-tensor reshaping: group-wise concatenation, then a split."""
    layer = name.split(".")[2] if ".layers." in name else ""
    hf = f"model.layers.{layer}."
    tail = name.split(".", 3)[-1] if layer else name

    def part(t, axis):
        return t.chunk(tp_size, axis)[tp_rank]

    def vocabulary(t):
        padded = torch.zeros(rows * tp_size, t.shape[1])
        padded[: len(t)] = t
        return part(padded, 0)

    norms = {
        "input_layernorm.weight": "input_layernorm",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
        "pre_mlp_layernorm.weight": "post_attention_layernorm",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
        "self_attention.q_layernorm.weight": "self_attn.q_norm",
        "self_attention.k_layernorm.weight": "self_attn.k_norm",
    }
    if tail in norms:
        return tensors[f"{hf}{norms[tail]}.weight"]
    if tail == "self_attention.linear_qkv.weight":
        groups = config["num_key_value_heads"]
        split = [tensors[f"{hf}self_attn.{x}_proj.weight"].unflatten(0, (groups, -1)) for x in "qkv"]
        return part(torch.cat(split, 1).flatten(0, 1), 0)
    if tail == "mlp.linear_fc1.weight":
        return torch.cat([part(tensors[f"{hf}mlp.{x}_proj.weight"], 0) for x in ("gate", "up")])
    if tail == "self_attention.linear_proj.weight":
        return part(tensors[f"{hf}self_attn.o_proj.weight"], 1)
    if tail == "mlp.linear_fc2.weight":
        return part(tensors[f"{hf}mlp.down_proj.weight"], 1)
    if name == "decoder.final_layernorm.weight":
        return tensors["model.norm.weight"]
    head = "lm_head.weight" if name == "output_layer.weight" and not config["tie_word_embeddings"] else None
    return vocabulary(tensors[head or "model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("spec", [0, 1])
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_shards_equal_the_reference(tmp_path, tp_size, pp_size, spec, tied):
    config = tiny_config(tie_word_embeddings=tied)
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors, files=3 if pp_size == 2 else 1)
    for pp_rank in range(pp_size):
        for tp_rank in range(tp_size):
            chunks = stage_chunks(config, tp_size, pp_rank, pp_size, spec)
            load_hf(chunks, folder, tp_rank=tp_rank, tp_size=tp_size)
            for name, p in global_parameters(chunks).items():
                expected = reference_shard(config, tensors, name, tp_rank, tp_size, p.shape[0])
                assert torch.equal(p, expected), name


def test_several_chunks_of_one_rank_keep_their_layers(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    folder = write_folder(tmp_path / "hf", config, tensors)
    chunks = stage_chunks(config, 1, 0, 4) + stage_chunks(config, 1, 2, 4)
    load_hf(chunks, folder, tp_rank=0, tp_size=1)
    down = chunks[1].get_parameter("decoder.layers.0.mlp.linear_fc2.weight")
    assert torch.equal(down, tensors["model.layers.2.mlp.down_proj.weight"])


def test_casts_to_the_parameters_dtype(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config, torch.bfloat16)
    folder = write_folder(tmp_path / "hf", config, tensors)
    chunks = stage_chunks(config, 1, 0, 1)
    load_hf(chunks, folder, tp_rank=0, tp_size=1)
    norm = chunks[0].get_parameter("decoder.final_layernorm.weight")
    assert norm.dtype == torch.float32
    assert torch.equal(norm, tensors["model.norm.weight"].float())


def broken(case, folder, config, tensors):
    """Damage a folder; returns the words that the message must have."""
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / "model.safetensors"
    if case == "missing":
        write_folder(folder, config, {k: v for k, v in tensors.items() if k != name})
        return [str(folder), name, "missing", "[48, 32]"]
    if case == "shape":
        write_folder(folder, config, tensors | {name: torch.zeros(40, 32)})
        return [str(file), name, "[40, 32]", "[48, 32]"]
    if case == "dtype":
        write_folder(folder, config, tensors | {name: torch.zeros(48, 32, dtype=torch.int8)})
        return [str(file), name, "I8", "BF16"]
    if case == "extra":
        write_folder(folder, config, tensors | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)})
        return [str(file), "model.layers.9.mlp.up_proj.weight", "no part"]
    if case == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
        return [str(file), "not a whole safetensors file"]
    if case == "garbage":
        file.write_bytes(b"<html>404</html>" * 10)
        return [str(file), "not a whole safetensors file"]
    if case == "no weights":
        file.unlink()
        return [str(folder), "model.safetensors"]
    if case == "lost file":
        file.unlink()
        write_folder(folder, config, tensors, files=3)
        (folder / "model-00002-of-00003.safetensors").unlink()
        return ["model-00002-of-00003.safetensors", "cannot be read"]
    if case == "bad json":
        (folder / "config.json").write_text("{")
        return ["config.json", "not valid JSON"]
    assert case == "index lies"
    file.unlink()
    write_folder(folder, config, tensors, files=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    return ["model-00001-of-00002.safetensors", "ghost", "missing"]


@pytest.mark.parametrize(
    "case",
    ["missing", "shape", "dtype", "extra", "truncated", "garbage", "no weights", "lost file", "bad json", "index lies"],
)
def test_a_broken_folder_is_refused_before_anything_changes(tmp_path, case):
    config = tiny_config()
    folder = write_folder(tmp_path / "hf", config, random_tensors(config))
    words = broken(case, folder, config, random_tensors(config))
    chunks = stage_chunks(config, 1, 0, 1)
    for check in (lambda: check_hf_folder(folder), lambda: load_hf(chunks, folder, tp_rank=0, tp_size=1)):
        with pytest.raises(UserError) as e:
            check()
        assert all(w in str(e.value) for w in words), e.value
    assert all(p.isnan().all() for p in chunks[0].parameters())


def test_inert_tensors_are_ignored(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    stale = {"lm_head.weight": torch.ones(101, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    folder = write_folder(tmp_path / "hf", config, tensors | stale)
    check_hf_folder(folder)


def test_a_model_of_another_config_is_refused(tmp_path):
    folder = write_folder(tmp_path / "hf", tiny_config(), random_tensors(tiny_config()))
    chunks = stage_chunks(tiny_config(intermediate_size=64), 1, 0, 1)
    with pytest.raises(UserError, match=r"linear_fc1.weight has shape \[128, 32\]; config.json asks for \[96, 32\]"):
        load_hf(chunks, folder, tp_rank=0, tp_size=1)
    assert all(p.isnan().all() for p in chunks[0].parameters())
