"""``config.json`` fields that several families share."""

from __future__ import annotations

from megatron_fleet.models.rules import Field

BASE = (
    Field("num_hidden_layers", "layers"),
    Field("hidden_size", "hidden"),
    Field("vocab_size", "vocab"),
    Field("intermediate_size", "ffn"),
    Field("max_position_embeddings", "context", default=None),
    Field("num_attention_heads", "heads"),
    Field("rms_norm_eps", "norm_eps"),
)
GROUPED_QUERY = (
    Field("num_key_value_heads", "groups"),
    Field("head_dim", "head", default=None),
)
LATENT = (
    Field("kv_lora_rank", "kv_lora"),
    Field("q_lora_rank", "q_lora", default=None),
    Field("qk_nope_head_dim", "nope"),
    Field("qk_rope_head_dim", "rotated"),
    Field("v_head_dim", "value"),
)
EXPERTS = (
    Field("n_routed_experts", "experts", also=("num_experts", "num_local_experts")),
    Field("num_experts_per_tok", "experts_per_token"),
    Field("moe_intermediate_size", "expert_ffn"),
)
GROUPED_ROUTING = (
    Field("routed_scaling_factor", "routing_scale"),
    Field("n_group", "expert_groups"),
    Field("topk_group", "top_groups"),
)
PREDICTION = (Field("num_nextn_predict_layers", "mtp", default=0, also=("num_mtp_layers",)),)

DENSE_FIXED = {"hidden_act": "silu", "use_sliding_window": False, "layer_types": ["full_attention"]}

WINDOW = ("sliding_window", "max_window_layers")
"""No effect while ``use_sliding_window`` is false."""

STALE_FREQUENCIES = r"{body}layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""A buffer that old versions saved; every framework recomputes it."""

HARMLESS = frozenset(
    [
        # Metadata about the file.
        *("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version"),
        # Storage of the weights, handled by their reader.
        *("quantization_config", "compression_config"),
        # Attention implementation, which does not change the result.
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        # Token ids and generation settings.
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"),
        *("bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("num_return_sequences", "remove_invalid_values", "return_dict_in_generate", "use_cache"),
        # Training settings: initialisation, dropout (off in reinforcement learning), auxiliary losses.
        *("initializer_range", "attention_dropout", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux"),
        *("output_router_logits", "pretraining_tp", "ep_size"),
        # Heads and outputs that a causal language model does not have.
        *("finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params"),
        *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "is_decoder"),
        *("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder"),
        *("tokenizer_class", "chunk_size_feed_forward", "pruned_heads", "tf_legacy_loss", "torchscript"),
        *("use_bfloat16",),
    ]
)
"""``config.json`` fields of any model that do not affect the computation."""
