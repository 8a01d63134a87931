"""config.json of one tiny model per family, in the spelling of transformers 4 and of transformers 5.

Sizes are awkward on purpose: a vocabulary that no tensor-parallel size divides, head widths that are not
hidden_size / heads, expert and latent widths that all differ. Every model splits into 2 tensor, 2 expert and
2 x 2 (virtual) pipeline parts.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

Dialect = Literal["v4", "v5"]
Config = dict[str, Any]

LAYERS = 4
_NOT_KEPT_BY_V5 = ("scoring_func", "topk_method", "moe_layer_freq", "seq_aux", "aux_loss_alpha", "ep_size")

FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
INT4: Config = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def _common(model_type: str, architecture: str, **sizes: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 96,
        "initializer_range": 0.02,
        "intermediate_size": 112,
        "max_position_embeddings": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.56.0",
        "use_cache": True,
        "vocab_size": 515,
    } | sizes


def _qwen(model_type: str, architecture: str, **sizes: Any) -> Config:
    window = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": LAYERS}
    return _common(model_type, architecture, **window, **sizes)


def _qwen3(**sizes: Any) -> Config:
    return _qwen("qwen3", "Qwen3ForCausalLM", head_dim=16, attention_bias=False, **sizes)


def _yarn(factor: float, beta_fast: float) -> Config:
    scaling = {"beta_fast": beta_fast, "beta_slow": 1.0, "factor": factor, "mscale": 1.0, "mscale_all_dim": 1.0}
    return scaling | {"original_max_position_embeddings": 64, "type": "yarn"}


def _deepseek(model_type: str = "deepseek_v3", **sizes: Any) -> Config:
    latent = {
        "attention_bias": False,
        "num_key_value_heads": 8,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
    }
    # transformers fixes 1e-6 for the norms of the latents, others take rms_norm_eps: they agree only on this value.
    experts = {
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "seq_aux": True,
        "aux_loss_alpha": 0.001,
    }
    return _common(model_type, "DeepseekV3ForCausalLM", **(latent | experts | sizes))


def _deepseek_v3(**sizes: Any) -> Config:
    grouped = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "rope_theta": 10000.0}
    scaling = {"rope_scaling": _yarn(40.0, 32.0), "max_position_embeddings": 2560}
    return _deepseek(**(grouped | scaling | sizes))


def _kimi_k2(factor: float, beta_fast: float, model_type: str = "kimi_k2", **sizes: Any) -> Config:
    rope = {"rope_theta": 50000.0, "rope_scaling": _yarn(factor, beta_fast), "routed_scaling_factor": 2.827}
    return _deepseek(model_type, max_position_embeddings=int(64 * factor), **rope, **sizes)


def _blocks_with_edges() -> Config:
    """Sizes of which most end in a part of a 128-wide block."""
    return {
        "hidden_size": 192,
        "intermediate_size": 208,
        "moe_intermediate_size": 144,
        "q_lora_rank": 136,
        "kv_lora_rank": 128,
        "quantization_config": FP8,
    }


def _groups_of_32() -> Config:
    """Expert widths that split into groups of 32, also on two tensor-parallel ranks."""
    return {"moe_intermediate_size": 64, "quantization_config": INT4}


def _kimi_k25() -> Config:
    text = _kimi_k2(64.0, 32.0, "deepseek_v3", **_groups_of_32())
    vision = {
        "model_type": "kimi_k25_vision",
        "patch_size": 14,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "vt_num_attention_heads": 2,
        "vt_num_hidden_layers": 2,
        "vt_hidden_size": 32,
        "vt_intermediate_size": 40,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": 32,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-05,
        "text_hidden_size": text["hidden_size"],
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "ignore_index": -100,
        "media_placeholder_token_id": 510,
        "quantization_config": INT4,
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": vision,
    }


def _qwen3_vl() -> Config:
    text = _common("qwen3_vl_text", "", head_dim=16, attention_bias=False, rope_theta=5000000.0)
    text["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
    for key in ("architectures", "transformers_version", "tie_word_embeddings"):
        del text[key]
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": 509,
        "video_token_id": 510,
        "vision_start_token_id": 511,
        "vision_end_token_id": 512,
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0",
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [0, 1],
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 40,
            "num_heads": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def _llama3() -> Config:
    scaling = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    return _common(
        "llama",
        "LlamaForCausalLM",
        attention_bias=False,
        mlp_bias=False,
        pretraining_tp=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        hidden_size=128,
        rope_theta=500000.0,
        # Not tiny: Megatron-Core fixes this length (RotaryEmbedding._apply_scaling).
        rope_scaling=scaling | {"original_max_position_embeddings": 8192},
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    )


def _qwen3_moe() -> Config:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
    sparsity = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    losses = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
    return _qwen("qwen3_moe", "Qwen3MoeForCausalLM", head_dim=16, attention_bias=False, **experts, **sparsity, **losses)


def _glm4_moe(**sizes: Any) -> Config:
    experts = {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
    }
    attention = {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True}
    return _common("glm4_moe", "Glm4MoeForCausalLM", rms_norm_eps=1e-5, **(experts | attention | sizes))


def _glm4_flash(**sizes: Any) -> Config:
    kept = ("moe_layer_freq", "seq_aux", "aux_loss_alpha", "ep_size", "pretraining_tp", "scoring_func")
    config = _deepseek("glm4_moe_lite", partial_rotary_factor=1.0, routed_scaling_factor=1.8, **sizes)
    config["architectures"] = ["Glm4MoeLiteForCausalLM"]
    return {name: value for name, value in config.items() if name not in kept}


def _qwen3_5(model_type: str, architecture: str, **sizes: Any) -> Config:
    """Text of Qwen3.5 as published; sizes by which float32 is exact enough (`tiny_models`)."""
    own = {
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 16,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 12,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "rope_type": "default",
        },
    }
    config = _common(model_type, architecture, **(own | sizes))
    return {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}


def _qwen3_5_moe(model_type: str, **sizes: Any) -> Config:
    experts = {
        "mlp_only_layers": [],
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 40,
    }
    config = _qwen3_5(model_type, "Qwen3_5MoeForCausalLM", **experts, **sizes)
    del config["intermediate_size"]
    return config


def _with_vision(text: Config, model_type: str, architecture: str) -> Config:
    for key in ("architectures", "transformers_version"):
        del text[key]
    vision = copy.deepcopy(_qwen3_vl()["vision_config"])
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "image_token_id": 509,
        "video_token_id": 510,
        "vision_start_token_id": 511,
        "vision_end_token_id": 512,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "vision_config": vision | {"deepstack_visual_indexes": [], "model_type": model_type},
    }


_V4: dict[str, Config] = {
    "qwen2": _qwen("qwen2", "Qwen2ForCausalLM"),
    "qwen2_tied": _qwen("qwen2", "Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen3": _qwen3(),
    "qwen3_tied": _qwen3(tie_word_embeddings=True),
    "qwen3_yarn": _qwen3(
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 64, "rope_type": "yarn"},
    ),
    "qwen3_moe": _qwen3_moe(),
    "llama3": _llama3(),
    "deepseek_v3": _deepseek_v3(),
    "deepseek_v3_mtp": _deepseek_v3(num_nextn_predict_layers=1),
    "deepseek_v3_fp8": _deepseek_v3(**_blocks_with_edges()),
    "moonlight": _deepseek(q_lora_rank=None, n_shared_experts=2, routed_scaling_factor=2.446, rope_theta=50000.0),
    "kimi_k2": _kimi_k2(32.0, 1.0),
    "kimi_k2_fp8": _kimi_k2(32.0, 1.0, **_blocks_with_edges()),
    "kimi_k2_thinking": _kimi_k2(64.0, 1.0, **_groups_of_32()),
    "kimi_k25": _kimi_k25(),
    "glm4_moe": _glm4_moe(),
    "glm4_moe_mtp": _glm4_moe(num_nextn_predict_layers=1),
    "glm4_flash": _glm4_flash(),
    "glm4_flash_mtp": _glm4_flash(num_nextn_predict_layers=1),
    "qwen3_vl": _qwen3_vl(),
    # As Qwen3.6 and 3.8 spell it.
    "qwen3_5_text": _qwen3_5(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        language_model_only=False,
        output_gate_type="swish",
        partial_rotary_factor=0.25,
        tie_word_embeddings=True,
    ),
    "qwen3_5": _with_vision(
        _qwen3_5("qwen3_5_text", "", mtp_num_hidden_layers=1), "qwen3_5", "Qwen3_5ForConditionalGeneration"
    ),
    "qwen3_5_moe_text": _qwen3_5_moe("qwen3_5_moe_text", mtp_num_hidden_layers=1),
    "qwen3_5_moe": _with_vision(
        _qwen3_5_moe("qwen3_5_moe_text", mtp_num_hidden_layers=1),
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
    ),
}

FAMILIES = tuple(_V4)


def raw_config(family: str, dialect: Dialect) -> Config:
    """The content of ``config.json`` of a family's tiny model, fresh.

    ``v4`` is how transformers 4 (and the published Kimi models) spell it; ``v5`` is what transformers 5.19 saves for
    a model of its own. Kimi K2 is unknown to transformers 5, its v5 form is what a configuration class of version 4
    saves there.
    """
    config = copy.deepcopy(_V4[family])
    return config if dialect == "v4" else _v5(config)


def _v5(config: Config) -> Config:
    for part in ("text_config", "vision_config"):
        if part in config:
            config[part] = _v5(config[part])
    if "torch_dtype" in config:
        config["dtype"] = config.pop("torch_dtype")
    if "transformers_version" in config:
        config["transformers_version"] = "5.19.0"
    model = config["model_type"]
    if "rope_theta" in config:
        scaling = config.pop("rope_scaling") or {"rope_type": "default"}
        config["rope_parameters"] = {"rope_type": scaling.get("type"), "rope_theta": config.pop("rope_theta")} | scaling
    if "depth" in config:
        config["model_type"] = f"{model}_vision"
        config["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "axial"}
    if model in ("qwen2", "qwen3"):
        config["layer_types"] = ["full_attention"] * LAYERS
    if model.startswith("qwen3_5") and model.endswith("_text"):
        config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"]
        del config["full_attention_interval"]
    if model == "qwen3_moe":
        config["num_local_experts"] = config.pop("num_experts")
    if model == "llama":
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if model == "glm4_moe":
        config["rope_parameters"]["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        config["output_router_logits"] = False
    if model == "glm4_moe_lite":
        config["rope_parameters"]["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        config["mlp_layer_types"] = ["dense"] + ["sparse"] * (LAYERS - 1)
        config["qk_head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        config |= {"pretraining_tp": 1, "rope_interleave": True, "output_router_logits": False}
        del config["topk_method"]
    if model == "deepseek_v3":
        config = {key: value for key, value in config.items() if key not in _NOT_KEPT_BY_V5}
        # The width of the rotary part, not of a head.
        config["head_dim"] = config["qk_rope_head_dim"]
        config["qk_head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        config |= {"rope_interleave": True, "output_router_logits": False}
    return config
