"""Configurations that vLLM serves and whose matrices consist of whole blocks of 128 x 128."""

from __future__ import annotations

from typing import Any

from served_models import served_config


def block_config(family: str, dialect: str) -> dict[str, Any]:
    """`served_config` with sizes that blocks divide; of a plain model, two layers."""
    config = served_config(family, dialect)
    text = config.get("text_config", config)
    text["hidden_size"] = 256
    text |= {name: 128 for name in ("moe_intermediate_size", "shared_expert_intermediate_size") if name in text}
    if "intermediate_size" in text:
        text["intermediate_size"] = 384
    if "layer_types" in text:
        text |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    else:
        text["num_hidden_layers"] = 2
    if "kv_lora_rank" in text:
        text["q_lora_rank"] = 128
    else:
        text |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return config
