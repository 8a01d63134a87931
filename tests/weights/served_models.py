"""Configurations that vLLM serves on CPU."""

from __future__ import annotations

from typing import Any

from tiny_configs import raw_config


def served_config(family: str, dialect: str, **sizes: Any) -> dict[str, Any]:
    """As published (vLLM reads fields that transformers 5 leaves out), with heads as wide as vLLM's kernels need.

    Args:
        sizes: other fields of the language model.
    """
    config = raw_config(family, "v4")
    text = config.get("text_config", config)
    if "kv_lora_rank" in text:
        sizes |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    elif "head_dim" in text:
        sizes |= {"head_dim": 32}
    else:
        sizes |= {"num_attention_heads": text["hidden_size"] // 32, "num_key_value_heads": 1}
    if "rope_parameters" in text:
        sizes["rope_parameters"] = text["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    text |= sizes
    return config
