"""Which tensors of a model block FP8 quantises, and how its ``config.json`` says so."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("torch")

import tiny_models
from block_models import block_config
from published_configs import published
from tiny_configs import raw_config

from megatron_fleet.weights.fp8_model import as_fp8, declare_fp8, declared_tensors, fp8_tensors
from megatron_fleet.weights.hf_model import Fp8, Plain, open_model
from megatron_fleet.weights.mapping import WeightTable

BODY = {"embed_tokens", "lm_head"}
ROUTED = {*BODY, "mlp.gate"}


def left_out(config: dict) -> set[str]:
    """Kinds of matrices that stay as they are."""
    table = WeightTable(config, prediction=False)
    quantised = set(fp8_tensors(table))
    names = [name for name, shape in table.tensors.items() if len(shape) > 1 and name not in quantised]
    return {re.sub(r"^.*layers\.\d+\.|^model\.(language_model\.)?|\.weight$", "", name) for name in names}


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("Qwen3-8B", BODY),
        ("Llama-3.2-1B", {"embed_tokens"}),
        ("Moonlight-16B-A3B", ROUTED),
        ("Qwen3-VL-8B", BODY),
        # 10944 is no multiple of 128: the dense layers' gate, up and down.
        ("GLM-4.5-Air", {*ROUTED, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        # A row for each head, and a convolution.
        ("Qwen3.5-9B", {*BODY, "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.conv1d"}),
    ],
)
def test_linear_layers_of_published_models_are_quantised_and_nothing_else(model, kinds):
    assert left_out(published()[model]) == kinds


def test_a_side_that_blocks_do_not_divide_keeps_the_joined_matrix_whole():
    config = block_config("qwen3", "v4")
    assert left_out(config) == BODY
    assert left_out(config | {"num_key_value_heads": 1}) == {
        *BODY, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
    }  # fmt: skip
    assert left_out(config | {"intermediate_size": 400}) == {*BODY, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert fp8_tensors(WeightTable(raw_config("qwen3", "v4"))) == ()


def test_layers_that_the_trainer_keeps_in_bf16_are_not_quantised():
    table = WeightTable(block_config("llama3", "v4") | {"num_hidden_layers": 5})
    layers = {int(re.search(r"layers\.(\d+)", name)[1]) for name in fp8_tensors(table, 1, 2)}
    assert layers == {1, 2}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl", "qwen3_5_moe"])
def test_the_declaration_says_what_is_quantised(tmp_path, monkeypatch, family):
    monkeypatch.setattr(tiny_models, "raw_config", block_config)
    model = open_model(tiny_models.make(family, tmp_path))
    tensors = fp8_tensors(model.table)[:-1]
    declared = json.loads(json.dumps(declare_fp8(model, tensors)))
    assert declared_tensors(model.table, declared) == tensors
    assert declared["quant_method"] == "fp8" and declared["weight_block_size"] == [128, 128]
    plain = set(declared["modules_to_not_convert"])
    assert {"lm_head", fp8_tensors(model.table)[-1].removesuffix(".weight")} <= plain
    vision = {name for name in plain if name.startswith("model.visual.")}
    assert len(vision) >= 8 if family == "qwen3_vl" else not vision or family == "qwen3_5_moe"
    assert not any("norm" in name for name in plain - vision)


def test_a_folder_as_if_it_were_in_fp8_has_the_names_of_the_releases(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_models, "raw_config", block_config)
    plain = open_model(tiny_models.make("qwen3_5_moe", tmp_path), prediction=False)
    model = as_fp8(plain, fp8_tensors(plain.table))
    expert = "model.language_model.layers.0.mlp.experts.3.down_proj"
    encoding = model.encodings[f"{expert}.weight"]
    assert isinstance(encoding, Fp8) and isinstance(plain.encodings[f"{expert}.weight"], Plain)
    assert model.stored[f"{expert}.weight_scale_inv"] is encoding.scales
    assert (encoding.codes.dtype, encoding.codes.shape) == ("F8_E4M3", (256, 128))
    assert (encoding.scales.dtype, encoding.scales.shape) == ("F32", (2, 1))
