"""Configurations that vLLM serves on CPU."""

from __future__ import annotations

from typing import Any

from tiny_configs import raw_config


def served_config(family: str, dialect: str) -> dict[str, Any]:
    """As published (vLLM reads fields that transformers 5 leaves out), with heads as wide as vLLM's kernels need."""
    config = raw_config(family, "v4")
    if "kv_lora_rank" in config:
        return config | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    if "head_dim" in config:
        return config | {"head_dim": 32}
    return config | {"num_attention_heads": config["hidden_size"] // 32, "num_key_value_heads": 1}
