"""A Megatron model chunk from an HF ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fleet.config.schema import Parallel
from megatron_fleet.platform.megatron.spec import has_transformer_engine, layer_spec
from megatron_fleet.policy.layout import check_layout, head_dim, padded_vocab_size, rope_theta
from megatron_fleet.policy.megatron.model import PolicyModel


def transformer_config(hf: Mapping[str, Any], parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Qwen3's sizes and Megatron's settings for this layout.

    Fusions are Transformer Engine's kernels, so they follow it. Losses come pre-scaled, hence
    ``calculate_per_token_loss``: Megatron then neither averages over micro-batches nor over data-parallel ranks.
    """
    fused = has_transformer_engine()
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=head_dim(hf),
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        qk_layernorm=True,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.tensor > 1,
        calculate_per_token_loss=True,
        # Every parameter is filled afterwards, from a checkpoint or by `init.fill_random`. Switching initialisation off
        # instead would leave out the marks by which gradient norms tell shards from copies.
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        apply_rope_fusion=fused,
        bias_dropout_fusion=fused,
        bias_activation_fusion=fused,
        # The activation is a module of the layer specification.
        use_te_activation_func=not fused,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=torch.cuda.is_available(),
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def build_chunk(
    hf: Mapping[str, Any],
    parallel: Parallel,
    dtype: torch.dtype,
    row_tokens: int,
    model_class: type[GPTModel] = PolicyModel,
) -> GPTModel:
    """This rank's pipeline stage, on its device, with uninitialised parameters. Process groups must exist.

    Args:
        hf: content of ``config.json``.
        row_tokens: capacity of a packed row, an upper bound of every position.
        model_class: GPTModel or a subclass; benchmarks build Megatron's own.

    Raises:
        UserError: the model is unknown or does not fit the layout.
    """
    check_layout(hf, parallel)
    config = transformer_config(hf, parallel, dtype)
    model = model_class(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=padded_vocab_size(hf["vocab_size"], parallel.tensor),
        max_sequence_length=row_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=rope_theta(hf),
    )
    model.real_vocab_size = hf["vocab_size"]
    return model.cuda() if torch.cuda.is_available() else model
