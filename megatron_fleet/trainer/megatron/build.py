"""Construction of Megatron model chunks from an HF ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_fleet.config.schema import ParallelConfig, Recompute
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.megatron_config import megatron_arguments
from megatron_fleet.models.model import Model
from megatron_fleet.platform.megatron.spec import has_transformer_engine, layer_spec
from megatron_fleet.trainer.layout import padded_vocab_size
from megatron_fleet.trainer.megatron.model import PolicyModel


def transformer_config(
    model: Model, parallel: ParallelConfig, dtype: torch.dtype, recompute: Recompute = "none", **more: Any
) -> TransformerConfig:
    """Combine a model's sizes with Megatron's settings for this layout.

    Fusions are Transformer Engine's kernels, so they are enabled with it. Losses come pre-scaled, hence
    ``calculate_per_token_loss``: Megatron then averages neither over micro-batches nor over data-parallel ranks.

    Args:
        more: further arguments of Megatron's configuration, which take precedence.
    """
    fused = has_transformer_engine()
    arguments = megatron_arguments(model)
    settings: dict[str, Any] = {
        "activation_func": F.silu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual if parallel.virtual > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "sequence_parallel": parallel.sequence_parallel,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor_size,
        "calculate_per_token_loss": True,
        # Every parameter is filled afterwards, from a checkpoint or by `init.fill_random`. Disabling initialisation
        # instead would omit the attributes by which gradient norms distinguish shards from copies.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        # The fused kernel of latent attention supports YaRN only; the other one ignores YaRN's scale in packed
        # sequences.
        "apply_rope_fusion": fused and model.latent == (model.rope.kind == "yarn"),
        "bias_dropout_fusion": fused,
        "bias_activation_fusion": fused,
        # The activation is a module of the layer specification.
        "use_te_activation_func": not fused,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "batch_p2p_comm": torch.cuda.is_available(),
    }
    if model.experts:
        settings |= {"moe_grouped_gemm": fused, "moe_token_dispatcher_type": "alltoall", "moe_permute_fusion": fused}
    cls = MLATransformerConfig if model.latent else TransformerConfig
    if model.linear_layers:
        # Before 0.18 Megatron refuses context parallelism with these layers; ours have it.
        settings["context_parallel_size"] = 1
    config = cls(**arguments.config | settings | _recompute(recompute) | more)
    if model.linear_layers:
        config.context_parallel_size = parallel.context
    for name, value in arguments.attributes.items():
        setattr(config, name, value)
    return config


def _recompute(recompute: Recompute) -> dict[str, Any]:
    if recompute == "none":
        return {}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": list(recompute)}


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


def build_chunks(
    hf: Mapping[str, Any],
    parallel: ParallelConfig,
    dtype: torch.dtype,
    micro_batch_tokens: int,
    recompute: Recompute = "none",
    model_class: type[GPTModel] = PolicyModel,
    **more: Any,
) -> list[GPTModel]:
    """This rank's chunks, on its device, with uninitialised parameters. Process groups must exist.

    Args:
        hf: content of ``config.json``, accepted by `policy.validate.validate`.
        micro_batch_tokens: capacity of a micro-batch, an upper bound of every position.
        model_class: GPTModel or a subclass; benchmarks build Megatron's own.
        more: see `transformer_config`.
    """
    model = read_model(hf)
    config = transformer_config(model, parallel, dtype, recompute, **more)
    pieces = range(parallel.virtual) if parallel.virtual > 1 else [None]
    return [build_stage(model, config, micro_batch_tokens, model_class, piece) for piece in pieces]


def build_stage(
    model: Model,
    config: TransformerConfig,
    micro_batch_tokens: int,
    model_class: type[GPTModel] = PolicyModel,
    virtual_stage: int | None = None,
) -> GPTModel:
    """Build one chunk from Megatron's configuration. ``virtual_stage``: its index on the rank, ``None``
    = the only one.
    """
    ends = {"ignore_virtual": False, "vp_stage": virtual_stage}
    stage = model_class(
        config=config,
        transformer_layer_spec=layer_spec(config, virtual_stage),
        vocab_size=padded_vocab_size(model.vocab, config.tensor_model_parallel_size),
        max_sequence_length=micro_batch_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=virtual_stage,
        **megatron_arguments(model).gpt,
    )
    stage.real_vocab_size = model.vocab
    return stage.cuda() if torch.cuda.is_available() else stage
