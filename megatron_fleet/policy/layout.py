"""Can this model be trained, and in this layout? Pure functions of ``config.json`` and the parallel sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Parallel
from megatron_fleet.weights.hf_config import read_model
from megatron_fleet.weights.megatron_config import megatron_arguments


def check_layout(hf_config: Mapping[str, Any], parallel: Parallel) -> None:
    """Refuse what cannot be built: an unknown architecture, or sizes that the layout does not divide.

    Raises:
        UserError: the first problem found, with advice.
    """
    model = read_model(hf_config)
    if model.experts or model.latent:
        raise UserError(
            f"config.json: model_type={hf_config['model_type']!r} can be converted but not trained yet; train a dense "
            f"model with grouped-query attention (Qwen2, Qwen3, Llama 3)."
        )
    megatron_arguments(model)
    for field, value, axis, size in (
        ("num_attention_heads", model.heads, "tensor", parallel.tensor),
        ("num_key_value_heads", model.groups or model.heads, "tensor", parallel.tensor),
        ("intermediate_size", model.ffn, "tensor", parallel.tensor),
        ("num_hidden_layers", model.layers, "pipeline", parallel.pipeline),
    ):
        if value % size:
            fitting = ", ".join(str(n) for n in range(1, size) if value % n == 0)
            raise UserError(
                f"parallel.{axis}={size} does not divide {field}={value} of the model's config.json; choose one of "
                f"{fitting}."
            )
    if model.vocab < parallel.tensor**2:
        raise UserError(
            f"parallel.tensor={parallel.tensor} is too large for vocab_size={model.vocab} of the model's config.json: "
            f"a rank would hold padding alone; lower it."
        )


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Vocabulary rows of the embedding and output weight over all tensor ranks: a multiple of ``tensor``."""
    return -(-vocab_size // tensor) * tensor


def row_alignment(parallel: Parallel) -> int:
    """``policy.row_tokens`` must be a multiple of this: sequence parallelism cuts rows into ``tensor`` slices."""
    return parallel.tensor
