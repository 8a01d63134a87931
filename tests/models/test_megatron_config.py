"""Megatron's arguments for every family, and the way back from the arguments in its checkpoints."""

from __future__ import annotations

import dataclasses

import pytest
from checkpoint_arguments import checkpoint_arguments
from published_configs import published
from tiny_configs import FAMILIES, raw_config

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.hf_config import read_model, write_config
from megatron_fleet.models.megatron_config import megatron_arguments, model_from_megatron
from megatron_fleet.models.model import Rope
from megatron_fleet.models.registry import ARCHITECTURES

MODELS = {name: read_model(raw) for name, raw in published().items()}
MODELS |= {family: read_model(raw_config(family, "v4")) for family in FAMILIES}

COMMON = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "multi_latent_attention": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "layernorm_zero_centered_gamma": False,
    "attention_output_gate": False,
}
NO_GROUPS = {"moe_router_num_groups": None, "moe_router_group_topk": None}
EXPERTS = {
    "moe_shared_expert_gate": False,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": True,
}
LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}
YARN = {
    "rope_type": "yarn",
    "original_max_position_embeddings": 4096,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def sizes(layers, hidden, ffn, heads, groups, eps):
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "layernorm_epsilon": eps,
    }


def experts(count, chosen, width, shared, scaling, freq):
    return {
        "num_moe_experts": count,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": shared,
        "moe_router_topk_scaling_factor": scaling,
        "moe_layer_freq": freq,
    }


def gpt(base, tied=False, percent=1.0, **more):
    return {
        "share_embeddings_and_output_weights": tied,
        "position_embedding_type": "rope",
        "rotary_base": base,
        "rotary_percent": percent,
    } | more


SOFTMAX = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_pre_softmax": False,
}
KIMI_EXPERTS = experts(384, 8, 2048, 2048, 2.827, [0] + [1] * 60) | NO_GROUPS | SIGMOID | EXPERTS
GOLDEN = {
    "Qwen2.5-7B": (
        COMMON | sizes(28, 3584, 18944, 28, 4, 1e-6) | {"kv_channels": 128, "add_qkv_bias": True},
        gpt(1000000.0),
    ),
    "Qwen3-0.6B": (
        COMMON | sizes(28, 1024, 3072, 16, 8, 1e-6) | {"kv_channels": 128, "qk_layernorm": True},
        gpt(1000000.0, tied=True),
    ),
    "Llama-3.1-8B": (
        COMMON | sizes(32, 4096, 14336, 32, 8, 1e-5) | {"kv_channels": 128},
        gpt(500000.0, rope_scaling=True, rope_scaling_factor=8.0),
    ),
    "Llama-3.2-1B": (
        COMMON | sizes(16, 2048, 8192, 32, 8, 1e-5) | {"kv_channels": 64},
        gpt(500000.0, tied=True, rope_scaling=True, rope_scaling_factor=32.0),
    ),
    "Qwen3-30B-A3B": (
        COMMON
        | sizes(48, 2048, 6144, 32, 4, 1e-6)
        | {"kv_channels": 128, "qk_layernorm": True}
        | experts(128, 8, 768, None, 1.0, 1)
        | NO_GROUPS
        | SOFTMAX
        | EXPERTS,
        gpt(1000000.0),
    ),
    "DeepSeek-V3": (
        COMMON
        | sizes(61, 7168, 18432, 128, 128, 1e-6)
        | LATENT
        | experts(256, 8, 2048, 2048, 2.5, [0] * 3 + [1] * 58)
        | {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
        | SIGMOID
        | EXPERTS
        | YARN
        | {"rotary_base": 10000.0, "rotary_scaling_factor": 40.0, "beta_fast": 32.0},
        gpt(10000.0),
    ),
    "Moonlight-16B-A3B": (
        COMMON
        | sizes(27, 2048, 11264, 16, 16, 1e-5)
        | LATENT
        | {"q_lora_rank": None}
        | experts(64, 6, 1408, 2816, 2.446, [0] + [1] * 26)
        | NO_GROUPS
        | SIGMOID
        | EXPERTS
        | {"rope_type": "rope", "rotary_base": 50000.0, "rotary_scaling_factor": 1.0},
        gpt(50000.0),
    ),
    "Kimi-K2-Instruct": (
        COMMON
        | sizes(61, 7168, 18432, 64, 64, 1e-6)
        | LATENT
        | KIMI_EXPERTS
        | YARN
        | {"rotary_base": 50000.0, "rotary_scaling_factor": 32.0, "beta_fast": 1.0},
        gpt(50000.0),
    ),
    "Kimi-K2.5": (
        COMMON
        | sizes(61, 7168, 18432, 64, 64, 1e-5)
        | LATENT
        | KIMI_EXPERTS
        | YARN
        | {"rotary_base": 50000.0, "rotary_scaling_factor": 64.0, "beta_fast": 32.0},
        gpt(50000.0),
    ),
    "GLM-4.5": (
        COMMON
        | sizes(92, 5120, 12288, 96, 8, 1e-5)
        | {"kv_channels": 128, "qk_layernorm": True, "add_qkv_bias": True}
        | experts(160, 8, 1536, 1536, 2.5, [0] * 3 + [1] * 89)
        | NO_GROUPS
        | SIGMOID
        | EXPERTS,
        gpt(1000000.0, percent=0.5),
    ),
    "Qwen3-VL-4B": (
        COMMON | sizes(36, 2560, 9728, 32, 8, 1e-6) | {"kv_channels": 128, "qk_layernorm": True},
        gpt(5000000.0, tied=True),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_arguments_of_published_models(name):
    arguments = megatron_arguments(MODELS[name])
    config, gpt = GOLDEN[name]
    if MODELS[name].latent:
        config = {key: value for key, value in config.items() if key != "attention_output_gate"}
    assert (arguments.config, arguments.gpt) == (config, gpt)
    assert arguments.attributes == {}


def test_yarn_without_latent_attention():
    arguments = megatron_arguments(MODELS["qwen3_yarn"])
    assert arguments.gpt["position_embedding_type"] == "yarn"
    assert arguments.attributes == {
        "yarn_rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 64,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": True,
    }


def test_weights_that_are_not_renormalised():
    model = dataclasses.replace(MODELS["qwen3_moe"], renormalise=False)
    assert megatron_arguments(model).config["moe_router_pre_softmax"] is True


def test_latent_attention_with_yarns_own_temperature():
    rope = dataclasses.replace(MODELS["DeepSeek-V3"].rope, mscale=None, mscale_all_dim=None)
    model = dataclasses.replace(MODELS["DeepSeek-V3"], rope=rope)
    config = megatron_arguments(model).config
    assert (config["mscale"], config["mscale_all_dim"]) == (1.0, 0.0)
    assert model_from_megatron(checkpoint_arguments(model)) == model


@pytest.mark.parametrize("name", MODELS)
def test_megatron_knows_the_arguments(name):
    transformer_config = pytest.importorskip("megatron.core.transformer.transformer_config")
    model = MODELS[name]
    cls = transformer_config.MLATransformerConfig if model.latent else transformer_config.TransformerConfig
    known = {field.name for field in dataclasses.fields(cls)}
    arguments = megatron_arguments(model)
    assert arguments.config.keys() <= known and not arguments.attributes.keys() & known


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("DeepSeek-V3", {"experts_per_token": 4}, "num_experts_per_tok=4 with topk_group=4 is routed differently"),
        ("DeepSeek-V3", {"top_groups": 2}, "num_experts_per_tok=8 with topk_group=2"),
        ("Kimi-K2.5", {"experts_per_token": 1}, "num_experts_per_tok=1 with a sigmoid router"),
        ("Kimi-K2.5", {"rope": Rope(1.0, "llama3", 8.0, 8192)}, "'llama3' with latent attention"),
        ("Llama-3.1-8B", {"rope": Rope(1.0, "llama3", 8.0, 4096)}, r"\(4096, 1.0, 4.0\): Megatron-Core knows only"),
        ("Llama-3.1-8B", {"rope": Rope(1.0, "llama3", 8.0, 8192, low_freq_factor=2.0)}, r"\(8192, 2.0, 4.0\)"),
        ("Llama-3.1-8B", {"rope": Rope(1.0, "llama3", 8.0, 8192, high_freq_factor=2.0)}, r"\(8192, 1.0, 2.0\)"),
        ("GLM-4.5", {"rope": Rope(1.0, "yarn", 4.0, 4096)}, "partial_rotary_factor=0.5 with YaRN"),
    ],
)
def test_what_megatron_cannot_compute_is_refused(name, change, message):
    with pytest.raises(UserError, match=message):
        megatron_arguments(dataclasses.replace(MODELS[name], **change))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_way_back(name, old):
    assert model_from_megatron(checkpoint_arguments(MODELS[name], old)) == MODELS[name]


def test_every_kind_of_router_comes_back():
    for change in ({"renormalise": False}, {"moe_layers": (True, False, True, False)}, {"routing_scale": 2.0}):
        model = dataclasses.replace(MODELS["qwen3_moe"], **change)
        assert model_from_megatron(checkpoint_arguments(model)) == model


def test_arguments_that_megatron_leaves_to_defaults():
    args = checkpoint_arguments(MODELS["Kimi-K2.5"])
    for name in ("beta_fast", "beta_slow", "original_max_position_embeddings", "rope_type"):
        del args[name]
    # These have no command line options; MLATransformerConfig says 32, 1, 4096 and yarn.
    assert model_from_megatron(args) == MODELS["Kimi-K2.5"]
    every = checkpoint_arguments(MODELS["qwen3_moe"]) | {"moe_layer_freq": 2}
    assert model_from_megatron(every).moe_layers == (True, False, True, False)
    ungrouped = checkpoint_arguments(MODELS["qwen3"]) | {"group_query_attention": False, "num_query_groups": 1}
    assert model_from_megatron(ungrouped).groups == 8
    padded = checkpoint_arguments(MODELS["qwen3"]) | {"vocab_size": None, "padded_vocab_size": 640}
    assert model_from_megatron(padded).vocab == 640
    short = checkpoint_arguments(MODELS["qwen3"]) | {"max_position_embeddings": None}
    assert model_from_megatron(short).context == 77


@pytest.mark.parametrize(
    "change", [{"apply_layernorm_1p": True}, {"attention_output_gate": True}, {"moe_shared_expert_gate": True}]
)
def test_parts_of_another_family_belong_to_none(change):
    model = model_from_megatron(checkpoint_arguments(MODELS["qwen3_moe"]) | change)
    for family in ARCHITECTURES.values():
        with pytest.raises((ValueError, UserError)):
            write_config(model, family, "bfloat16")


def test_linear_layers_by_a_stride():
    args = checkpoint_arguments(MODELS["qwen3_5_text"]) | {"linear_attention_freq": 4}
    assert model_from_megatron(args) == MODELS["qwen3_5_text"]
    with pytest.raises(UserError, match=r"linear_attention_freq=\[1, 0\] does not fit num_layers=4"):
        model_from_megatron(args | {"linear_attention_freq": [1, 0]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalization": "LayerNorm"}, "normalization='LayerNorm' is not supported, only 'RMSNorm'"),
        ({"swiglu": False}, "swiglu=False"),
        ({"swiglu": None}, "swiglu=None"),
        ({"add_bias_linear": True}, "add_bias_linear=True"),
        ({"add_bias_linear": None}, "add_bias_linear=None"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True"),
        ({"window_size": (128, 0)}, r"window_size=\(128, 0\)"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant='dsa'"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type='learned_absolute'"),
        ({"position_embedding_type": None}, "position_embedding_type=None"),
        ({"position_embedding_type": "yarn"}, "yarn_rotary_scaling_factor is missing"),
        ({"num_layers": None}, "num_layers is missing; give --template"),
        ({"layernorm_epsilon": None}, "layernorm_epsilon is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"moe_router_topk": None}, "moe_router_topk is missing"),
        ({"moe_layer_freq": [1, 1]}, r"moe_layer_freq=\[1, 1\] does not fit num_layers=4"),
        ({"moe_layer_freq": [0, 0, 0, 0]}, "moe_layer_freq"),
        ({"experimental_attention_variant": "gated_delta_net"}, "linear_num_key_heads is missing"),
    ],
)
def test_checkpoints_of_other_models_are_refused(change, message):
    with pytest.raises(UserError, match=f"checkpoint argument {message}"):
        model_from_megatron(checkpoint_arguments(MODELS["qwen3_moe"]) | change)
