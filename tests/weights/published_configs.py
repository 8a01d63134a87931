"""Settings of published models: the fields of their ``config.json``, as far as anything depends on them.

Every field that a file has is here, so that none is unknown to the reader. What only names tokens, code or versions is
shortened.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

FP8: Config = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
INT4: Config = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                **dict.fromkeys(("actorder", "block_structure")),
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
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def _sizes(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, context: int) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


def _file(model_type: str, architecture: str, *parts: Config, **more: Any) -> Config:
    common = {
        "model_type": model_type,
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
    }
    for part in (*parts, more):
        common |= part
    return common


def _qwen(model_type: str, architecture: str, sizes: Config, **more: Any) -> Config:
    window = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": sizes["num_hidden_layers"]}
    return _file(model_type, architecture, sizes, window, {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0}, more)


def _qwen3(sizes: Config, **more: Any) -> Config:
    more = {"attention_bias": False, "head_dim": 128, "rope_scaling": None} | more
    return _qwen("qwen3", "Qwen3ForCausalLM", sizes, **more)


def _qwen3_moe(sizes: Config, experts: int, width: int, **more: Any) -> Config:
    moe = {
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": 128,
        "rope_scaling": None,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    return _qwen("qwen3_moe", "Qwen3MoeForCausalLM", sizes, **moe, **more)


def _llama(sizes: Config, factor: float, **more: Any) -> Config:
    bands = {"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    rope = {"rope_theta": 500000.0, "rope_scaling": {"factor": factor, "rope_type": "llama3", **bands}}
    rest = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5}
    return _file("llama", "LlamaForCausalLM", sizes, rope, rest, more)


def _deepseek(sizes: Config, experts: int, chosen: int, width: int, **more: Any) -> Config:
    latent = {
        "attention_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    moe = {
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "ep_size": 1,
        "num_nextn_predict_layers": 0,
        "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
    }
    return _file("deepseek_v3", "DeepseekV3ForCausalLM", sizes, latent, moe, more)


def _yarn(factor: float, fast: float) -> Config:
    ramp = {"beta_fast": fast, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, **ramp}


def _kimi(context: int, factor: float, fast: float, eps: float, **more: Any) -> Config:
    losses = {"aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1}
    rope = {"rope_theta": 50000.0, "rope_scaling": _yarn(factor, fast), "routed_scaling_factor": 2.827}
    sizes = _sizes(61, 7168, 18432, 64, 64, 163840, context)
    more = {"model_type": "kimi_k2", "rms_norm_eps": eps, **losses, **rope, **more}
    return _deepseek(sizes, 384, 8, 2048, **more)


def _glm(sizes: Config, experts: int, width: int, dense: int, scaling: float, **more: Any) -> Config:
    moe = {
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": width,
        "first_k_dense_replace": dense,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": scaling,
        "num_nextn_predict_layers": 1,
    }
    attention = {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "pad_token_id": 0}
    rest = {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000}
    return _file("glm4_moe", "Glm4MoeForCausalLM", sizes, moe, attention, rest, more)


def _glm_flash(sizes: Config) -> Config:
    latent = {
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
    }
    more = {"num_experts_per_tok": 4, "topk_method": "noaux_tc", "partial_rotary_factor": 1.0} | latent
    flash = _glm(sizes, 64, 1536, 1, 1.8) | {"model_type": "glm4_moe_lite"} | more
    return {k: v for k, v in flash.items() if k != "head_dim"} | {"attention_bias": False}


_SAVED_WHOLE = {
    **dict.fromkeys(
        ("bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id")
    ),
    **dict.fromkeys(("exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "prefix")),
    **dict.fromkeys(("forced_eos_token_id", "problem_type", "sep_token_id", "suppress_tokens", "tokenizer_class")),
    **dict.fromkeys(("add_cross_attention", "do_sample", "early_stopping", "is_decoder", "is_encoder_decoder"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "remove_invalid_values"), False),
    **dict.fromkeys(("return_dict_in_generate", "tf_legacy_loss", "tie_encoder_decoder", "torchscript"), False),
    **dict.fromkeys(("chunk_size_feed_forward", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "temperature", "top_p", "typical_p"), 1.0),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 1),
    "no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
    "max_length": 20,
    "top_k": 50,
    "use_bfloat16": False,
    "_name_or_path": "",
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "pruned_heads": {},
    "task_specific_params": None,
    "return_dict": True,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
"""Fields that older releases of transformers write into the part of a file that describes a part of a model."""


def _kimi_k25() -> Config:
    text = _kimi(262144, 64.0, 32.0, 1e-5, quantization_config=INT4, **_SAVED_WHOLE)
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "ignore_index": -100,
        "media_placeholder_token_id": 3,
        "model_type": "kimi_k25",
        "pad_token_id": 2,
        "quantization_config": INT4,
        "text_config": text,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
    }


def _qwen3_vl(hidden: int, ffn: int, text: Config, **more: Any) -> Config:
    sizes = _sizes(36, hidden, ffn, 32, 8, 151936, 262144)
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = _file("qwen3_vl_text", "", sizes, {"attention_bias": False, "head_dim": 128}, {"dtype": "bfloat16"}, text)
    text |= {"rms_norm_eps": 1e-6, "rope_theta": 5000000, "rope_scaling": rope}
    for name in ("architectures", "torch_dtype", "transformers_version"):
        del text[name]
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": text,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 151656,
        "vision_config": {"depth": 24, "model_type": "qwen3_vl", "out_hidden_size": hidden},
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    } | more


def _qwen3_5(sizes: Config, value_heads: int, tied: bool = False, model_type: str = "qwen3_5", **more: Any) -> Config:
    layers = sizes["num_hidden_layers"]
    text = {
        "model_type": f"{model_type}_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "use_cache": True,
        **sizes,
        **more,
    }
    return {
        "model_type": model_type,
        "architectures": ["x"],
        "image_token_id": 248056,
        "video_token_id": 248057,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {"depth": 27},
    }


def _qwen3_5_moe(sizes: Config, value_heads: int, experts: int, chosen: int, width: int) -> Config:
    sizes = {name: value for name, value in sizes.items() if name != "intermediate_size"}
    return _qwen3_5(
        sizes,
        value_heads,
        model_type="qwen3_5_moe",
        mlp_only_layers=[],
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=chosen,
        output_router_logits=False,
        router_aux_loss_coef=0.001,
        shared_expert_intermediate_size=width,
    )


def _qwen3_6(config: Config) -> Config:
    """The same model with the fields that Qwen3.6 added."""
    more = {"output_gate_type": "swish", "partial_rotary_factor": 0.25, "bos_token_id": 248044, "pad_token_id": None}
    return config | {"language_model_only": False, "text_config": config["text_config"] | more}


def published() -> dict[str, Config]:
    """Name of a model → its configuration, fresh."""
    llama_vocab = {"vocab": 128256, "context": 131072}
    qwen_vocab = {"vocab": 151936, "context": 40960}
    moonlight = {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5}
    v3 = {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6}
    v3 |= {"rope_theta": 10000, "rope_scaling": _yarn(40, 32), "num_nextn_predict_layers": 1}
    v3_sizes = _sizes(61, 7168, 18432, 128, 128, 129280, 163840)
    return {
        "Qwen2.5-7B": _qwen(
            "qwen2", "Qwen2ForCausalLM", _sizes(28, 3584, 18944, 28, 4, 152064, 131072), use_mrope=False
        )
        | {"sliding_window": 131072},
        "Qwen3-0.6B": _qwen3(_sizes(28, 1024, 3072, 16, 8, **qwen_vocab), tie_word_embeddings=True),
        "Qwen3-8B": _qwen3(_sizes(36, 4096, 12288, 32, 8, **qwen_vocab)),
        "Qwen3-30B-A3B": _qwen3_moe(_sizes(48, 2048, 6144, 32, 4, **qwen_vocab), 128, 768, attention_bias=False),
        "Qwen3-235B-A22B": _qwen3_moe(_sizes(94, 4096, 12288, 64, 4, **qwen_vocab), 128, 1536, attention_bias=False),
        "Qwen3-Coder-480B-A35B": _qwen3_moe(
            _sizes(62, 6144, 8192, 96, 8, 151936, 262144), 160, 2560, qkv_bias=False, use_qk_norm=True
        )
        | {"shared_expert_intermediate_size": 0, "rope_theta": 10000000},
        "Llama-3.1-8B": _llama(_sizes(32, 4096, 14336, 32, 8, **llama_vocab), 8.0),
        "Llama-3.2-1B": _llama(
            _sizes(16, 2048, 8192, 32, 8, **llama_vocab), 32.0, head_dim=64, tie_word_embeddings=True
        ),
        "DeepSeek-V3": _deepseek(v3_sizes, 256, 8, 2048, quantization_config=FP8, **v3),
        "DeepSeek-V3.1": _deepseek(v3_sizes, 256, 8, 2048, quantization_config=FP8 | {"scale_fmt": "ue8m0"}, **v3),
        "Moonlight-16B-A3B": _deepseek(_sizes(27, 2048, 11264, 16, 16, 163840, 8192), 64, 6, 1408, **moonlight)
        | {"rope_theta": 50000.0, "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1},
        "Kimi-K2-Instruct": _kimi(131072, 32.0, 1.0, 1e-6, quantization_config=FP8),
        "Kimi-K2-Thinking": _kimi(262144, 64.0, 1.0, 1e-5, quantization_config=INT4, **_SAVED_WHOLE),
        "Kimi-K2.5": _kimi_k25(),
        "GLM-4.5": _glm(_sizes(92, 5120, 12288, 96, 8, 151552, 131072), 160, 1536, 3, 2.5, use_qk_norm=True),
        "GLM-4.5-Air": _glm(_sizes(46, 4096, 10944, 96, 8, 151552, 131072), 128, 1408, 1, 1.0, use_qk_norm=False),
        "GLM-4.7-Flash": _glm_flash(_sizes(47, 2048, 10240, 20, 20, 154880, 202752)),
        "Qwen3-VL-4B": _qwen3_vl(2560, 9728, {"tie_word_embeddings": True}, tie_word_embeddings=True),
        "Qwen3-VL-8B": _qwen3_vl(4096, 12288, {}),
        "Qwen3.5-0.8B": _qwen3_5(_sizes(24, 1024, 3584, 8, 2, 248320, 262144), 16, tied=True),
        "Qwen3.5-9B": _qwen3_5(_sizes(32, 4096, 12288, 16, 4, 248320, 262144), 32),
        "Qwen3.5-27B": _qwen3_5(_sizes(64, 5120, 17408, 24, 4, 248320, 262144), 48),
        "Qwen3.5-35B-A3B": _qwen3_5_moe(_sizes(40, 2048, 0, 16, 2, 248320, 262144), 32, 256, 8, 512),
        "Qwen3.6-35B-A3B": _qwen3_6(_qwen3_5_moe(_sizes(40, 2048, 0, 16, 2, 248320, 262144), 32, 256, 8, 512)),
        "Qwen3.5-397B-A17B": _qwen3_5_moe(_sizes(60, 4096, 0, 32, 2, 248320, 262144), 64, 512, 10, 1024),
    }
