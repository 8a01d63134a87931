"""Qwen3, dense: grouped-query attention with query and key norms, SwiGLU, tied or untied word embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.rules import Architecture, Leaf, Rule

HF = "model.layers.{i}."
MEGATRON = "decoder.layers.{i}."


def _dims(config: Mapping[str, Any]) -> dict[str, int]:
    if config.get("attention_bias"):
        raise UserError("config.json: attention_bias is true; Qwen3 models with attention biases are not supported.")
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    groups = config.get("num_key_value_heads") or heads
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "vocab": config["vocab_size"],
        "ffn": config["intermediate_size"],
        "head": head,
        "groups": groups,
        "q": heads * head,
        "kv": groups * head,
    }


ARCHITECTURE = Architecture(
    dims=_dims,
    before=(
        Rule(
            ("embedding.word_embeddings.weight",),
            (Leaf("model.embed_tokens.weight", ("vocab", "hidden")),),
            layout="vocab",
            shard=0,
        ),
    ),
    layer=(
        Rule(
            (MEGATRON + "input_layernorm.weight", MEGATRON + "self_attention.linear_qkv.layer_norm_weight"),
            (Leaf(HF + "input_layernorm.weight", ("hidden",)),),
        ),
        Rule(
            (MEGATRON + "self_attention.linear_qkv.weight",),
            (
                Leaf(HF + "self_attn.q_proj.weight", ("q", "hidden")),
                Leaf(HF + "self_attn.k_proj.weight", ("kv", "hidden")),
                Leaf(HF + "self_attn.v_proj.weight", ("kv", "hidden")),
            ),
            layout="qkv",
            shard=0,
        ),
        Rule((MEGATRON + "self_attention.q_layernorm.weight",), (Leaf(HF + "self_attn.q_norm.weight", ("head",)),)),
        Rule((MEGATRON + "self_attention.k_layernorm.weight",), (Leaf(HF + "self_attn.k_norm.weight", ("head",)),)),
        Rule(
            (MEGATRON + "self_attention.linear_proj.weight",),
            (Leaf(HF + "self_attn.o_proj.weight", ("hidden", "q")),),
            shard=1,
        ),
        Rule(
            (MEGATRON + "pre_mlp_layernorm.weight", MEGATRON + "mlp.linear_fc1.layer_norm_weight"),
            (Leaf(HF + "post_attention_layernorm.weight", ("hidden",)),),
        ),
        Rule(
            (MEGATRON + "mlp.linear_fc1.weight",),
            (
                Leaf(HF + "mlp.gate_proj.weight", ("ffn", "hidden")),
                Leaf(HF + "mlp.up_proj.weight", ("ffn", "hidden")),
            ),
            layout="concat",
            shard=0,
        ),
        Rule(
            (MEGATRON + "mlp.linear_fc2.weight",),
            (Leaf(HF + "mlp.down_proj.weight", ("hidden", "ffn")),),
            shard=1,
        ),
    ),
    after=(
        Rule(("decoder.final_layernorm.weight",), (Leaf("model.norm.weight", ("hidden",)),)),
        Rule(
            ("output_layer.weight",),
            (Leaf("lm_head.weight", ("vocab", "hidden"), tied="model.embed_tokens.weight"),),
            layout="vocab",
            shard=0,
        ),
    ),
    inert=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
