"""Can this model be trained, and in this layout? Pure functions of ``config.json`` and the parallel sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Parallel

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)
_FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def check_layout(hf_config: Mapping[str, Any], parallel: Parallel) -> None:
    """Refuse what cannot be built: an unknown architecture, or sizes that the layout does not divide.

    Raises:
        UserError: the first problem found, with advice.
    """
    check_architecture(hf_config)
    for field, axis, size in (
        ("num_attention_heads", "tensor", parallel.tensor),
        ("num_key_value_heads", "tensor", parallel.tensor),
        ("intermediate_size", "tensor", parallel.tensor),
        ("num_hidden_layers", "pipeline", parallel.pipeline),
    ):
        if hf_config[field] % size:
            fitting = ", ".join(str(n) for n in range(1, size) if hf_config[field] % n == 0)
            raise UserError(
                f"parallel.{axis}={size} does not divide {field}={hf_config[field]} of the model's config.json; "
                f"choose one of {fitting}."
            )
    if hf_config["vocab_size"] < parallel.tensor**2:
        raise UserError(
            f"parallel.tensor={parallel.tensor} is too large for vocab_size={hf_config['vocab_size']} of the model's "
            f"config.json: a rank would hold padding alone; lower it."
        )


def check_architecture(hf_config: Mapping[str, Any]) -> None:
    """Raise UserError unless this is a dense Qwen3 that the policy implements exactly."""
    if hf_config.get("model_type") != "qwen3":
        raise UserError(
            f"config.json: model_type={hf_config.get('model_type')!r} is not supported; use a dense Qwen3 model "
            f"(model_type 'qwen3')."
        )
    for field in _REQUIRED:
        if field not in hf_config:
            raise UserError(f"config.json: {field} is missing; use the config.json that belongs to the weights.")
    for field, value in _FIXED.items():
        if hf_config.get(field, value) != value:
            raise UserError(
                f"config.json: {field}={hf_config[field]!r} is not supported for qwen3, only {value!r}; use a model "
                f"without it."
            )
    if hf_config["num_attention_heads"] % hf_config["num_key_value_heads"]:
        raise UserError(
            f"config.json: num_key_value_heads={hf_config['num_key_value_heads']} does not divide "
            f"num_attention_heads={hf_config['num_attention_heads']}; correct the file."
        )
    rope_theta(hf_config)


def rope_theta(hf_config: Mapping[str, Any]) -> float:
    """RoPE base, from ``rope_theta`` (transformers 4) or ``rope_parameters.rope_theta`` (transformers 5).

    Raises:
        UserError: no base, or a RoPE type other than the default (YaRN, linear, …).
    """
    parameters = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise UserError(
            f"config.json: rope type {kind!r} is not supported; remove rope_scaling and train within the model's "
            f"native context."
        )
    theta = parameters.get("rope_theta", hf_config.get("rope_theta"))
    if theta is None:
        raise UserError("config.json: neither rope_theta nor rope_parameters.rope_theta is there; add the RoPE base.")
    return float(theta)


def head_dim(hf_config: Mapping[str, Any]) -> int:
    """Width of one attention head."""
    return hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Vocabulary rows of the embedding and output weight over all tensor ranks: a multiple of ``tensor``."""
    return -(-vocab_size // tensor) * tensor


def row_alignment(parallel: Parallel) -> int:
    """``policy.row_tokens`` must be a multiple of this: sequence parallelism cuts rows into ``tensor`` slices."""
    return parallel.tensor
