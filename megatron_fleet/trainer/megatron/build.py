"""Construction of Megatron model chunks from an HF ``config.json``, and their random parameters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import fast_gelu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_fleet.config.schema import ParallelConfig, Recompute
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.layout import padded_vocab_size
from megatron_fleet.models.megatron_config import megatron_arguments
from megatron_fleet.models.model import Model
from megatron_fleet.platform.megatron.spec import has_transformer_engine, layer_spec
from megatron_fleet.trainer.megatron.model import PolicyModel

_ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": fast_gelu}
"""`Model.activation` → the function; the identity of the first tells Megatron which fused kernels fit."""


def transformer_config(
    model: Model, parallel: ParallelConfig, dtype: torch.dtype, recompute: Recompute = "none", **more: Any
) -> TransformerConfig:
    """Combine a model's sizes with Megatron's settings for this layout.

    Most fusions are Transformer Engine's kernels, so they are enabled with it. Losses come pre-scaled, hence
    ``calculate_per_token_loss``: Megatron then averages neither over micro-batches nor over data-parallel ranks.

    ``tp_comm_overlap`` stays off: its user buffers are made for one number of tokens (transformer_engine 2.11 to 2.20,
    ``initialize_ub``), and micro-batches here are as wide as their sequences need.

    Args:
        more: further arguments of Megatron's configuration, which take precedence.
    """
    fused, silu = has_transformer_engine(), model.activation == "silu"
    # Megatron's SwiGLU is compiled for the device; it keeps nothing but its input for the backward pass.
    compiled = silu and (fused or torch.cuda.is_available())
    arguments = megatron_arguments(model)
    settings: dict[str, Any] = {
        "activation_func": _ACTIVATIONS[model.activation],
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
        # Every parameter is filled afterwards, from a checkpoint or by `fill_random`. Disabling initialisation
        # instead would omit the attributes by which gradient norms distinguish shards from copies.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        # The fused kernel of latent attention supports YaRN only.
        "apply_rope_fusion": fused and (not model.latent or model.rope.kind == "yarn"),
        "bias_dropout_fusion": fused,
        # Megatron's fused GELU is the approximation by a tanh, whichever is asked for.
        "bias_activation_fusion": compiled,
        # SwiGLU is a module of the layer specification.
        "use_te_activation_func": silu and not compiled,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # With two interleaved stages a batch has two sends to the same rank, an activation and a gradient, and NCCL
        # pairs them with that rank's receives by order alone: each would arrive as the other.
        "batch_p2p_comm": torch.cuda.is_available() and parallel.virtual == 1,
        # Otherwise the host waits for the whole device after each send, because of a bug of old PyTorch versions.
        "batch_p2p_sync": False,
    }
    if model.experts:
        settings |= {"moe_grouped_gemm": fused, "moe_token_dispatcher_type": "alltoall", "moe_permute_fusion": fused}
    cls = MLATransformerConfig if model.latent else TransformerConfig
    if model.mixer is not None:
        # Before 0.18 Megatron refuses context parallelism with other layers than attention; ours have it.
        settings["context_parallel_size"] = 1
    config = cls(**arguments.config | settings | _recompute(recompute) | more)
    if model.mixer is not None:
        config.context_parallel_size = parallel.context
    for name, value in arguments.attributes.items():
        setattr(config, name, value)
    if config.apply_rope_fusion and not model.latent:
        # The fused kernel for packed sequences leaves out the factor by which YaRN scales query and key.
        factor = _yarn_get_concentration_factor_from_config(config)
        config.softmax_scale = factor**2 / math.sqrt(config.kv_channels) if factor != 1 else None
    return config


def _recompute(recompute: Recompute) -> dict[str, Any]:
    if recompute == "none":
        return {}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if isinstance(recompute, int):
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": recompute}
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


def stage_layers(
    model: Model, config: TransformerConfig, virtual_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Layer specification of one chunk, see `layer_spec`."""
    if model.mixer is None:
        return layer_spec(config, virtual_stage)
    return layer_spec(config, virtual_stage, model.mixer.layer(), model.mixer.pattern)


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
        transformer_layer_spec=stage_layers(model, config, virtual_stage),
        vocab_size=padded_vocab_size(model.vocab, config.tensor_model_parallel_size),
        max_sequence_length=micro_batch_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=virtual_stage,
        **megatron_arguments(model).gpt,
    )
    stage.real_vocab_size = model.vocab
    return stage.cuda() if torch.cuda.is_available() else stage


def parameter_shards(model_chunks: Sequence[MegatronModule]) -> Iterator[ShardedTensor]:
    """This rank's parameters with their place in the whole model (key, global shape, global offset)."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for chunk in model_chunks:
        state = chunk.sharded_state_dict(metadata=metadata)
        apply_factories(state)
        for value in nested_values(state):
            if isinstance(value, ShardedTensor) and value.data is not None:
                yield value


@torch.no_grad()
def fill_random(model_chunks: Sequence[MegatronModule], std: float, seed: int, vocab_size: int) -> None:
    """Fill matrices with Normal(0, std), norms with a gain of one, vocabulary padding and expert biases with zero.

    A value depends only on the seed, the parameter and the place in it, so it is the same in every layout.
    """
    gain = 0.0 if model_chunks[0].config.layernorm_zero_centered_gamma else 1.0
    for shard in parameter_shards(model_chunks):
        shape = list(shard.global_shape)
        if "norm" in shard.key:
            shard.data.fill_(gain)
            continue
        if shard.key.endswith("expert_bias"):
            shard.data.zero_()
            continue
        padded = "word_embeddings" in shard.key or "output_layer" in shard.key
        if padded:
            shape[0] = vocab_size
        digest = hashlib.sha256(f"{seed} {shard.key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.randn(shape, generator=generator) * std
        if padded and shard.global_shape[0] > vocab_size:
            whole = torch.cat([whole, whole.new_zeros(shard.global_shape[0] - vocab_size, *shape[1:])])
        sizes = [1] * shard.prepend_axis_num + list(shard.local_shape)
        place = tuple(slice(o, o + n) for o, n in zip(shard.global_offset, sizes, strict=True))
        shard.data.copy_(whole[place].reshape(shard.data.shape))
