"""Sizes that follow from a layout, and whether a model can be trained in it: pure functions of ``config.json`` and the
configuration.

Most configurations refused here would fail in the middle of a start on all ranks; some would train incorrectly:
mixtures of experts split over tensor ranks without sequence parallelism, or with experts split differently from the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ParallelConfig, PolicyConfig, PrecisionConfig, Recompute
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.megatron_config import megatron_arguments
from megatron_fleet.models.model import Model

FP8_BLOCK = 128
"""Values per scale of the blockwise recipe, along tokens and along both sides of a weight."""
FP8_SIDE = 16
"""Multiple that cuBLAS requires of both sides of an FP8 matrix."""


def token_alignment(precision: PrecisionConfig) -> int:
    """Multiple that each rank's number of tokens in a micro-batch must have.

    FP8 products require 16; the blockwise recipe 128, since the gradient of a weight sums over tokens in blocks of that
    size.
    """
    if not precision.fp8:
        return 1
    return FP8_BLOCK if precision.recipe == "fp8_blockwise" else FP8_SIDE


def validate(
    hf_config: Mapping[str, Any], parallel: ParallelConfig, recompute: Recompute = "none", lora_rank: int = 0
) -> None:
    """Refuse a model that cannot be built: an unknown architecture, or incompatible sizes and switches.

    Raises:
        UserError: the first problem found, with advice.
    """
    model = read_model(hf_config)
    megatron_arguments(model)
    _divisions(model, parallel)
    layers_of_stages(model.layers, parallel)
    for rule in _RULES:
        if problem := rule(model, parallel):
            raise UserError(problem)
    _recompute(model, parallel, recompute)
    if lora_rank and model.mixer is not None:
        raise UserError(
            f"policy.lora.rank={lora_rank}: this model has {model.mixer.name} layers, for which there are no adapters; "
            f"set policy.lora.rank=0."
        )


def _divisions(model: Model, p: ParallelConfig) -> None:
    dense = not (model.moe_layers and all(model.moe_layers))
    groups = model.heads if model.latent else model.groups or model.heads
    for field, value, axis, size in (
        ("num_attention_heads", model.heads, "tensor", p.tensor),
        ("num_key_value_heads", groups, "tensor", p.tensor),
        ("intermediate_size", model.ffn if dense else 0, "tensor", p.tensor),
        *([] if model.mixer is None else [(*model.mixer.heads, "tensor", p.tensor)]),
        ("width of the shared experts", model.shared_ffn, "tensor", p.tensor),
        ("moe_intermediate_size", model.expert_ffn, "expert_tensor", p.expert_tensor_size),
        ("number of experts", model.experts, "expert", p.expert),
    ):
        if value % size:
            fitting = ", ".join(str(n) for n in range(1, size) if value % n == 0)
            raise UserError(
                f"parallel.{axis}={size} does not divide {field}={value} of the model's config.json; choose one of "
                f"{fitting}."
            )


def _vocabulary(model: Model, p: ParallelConfig) -> str | None:
    if model.vocab >= p.tensor**2:
        return None
    return (
        f"parallel.tensor={p.tensor} is too large for vocab_size={model.vocab} of the model's config.json: a rank "
        f"would hold padding alone; lower it."
    )


def _virtual(_: Model, p: ParallelConfig) -> str | None:
    if p.virtual == 1 or p.pipeline > 1:
        return None
    return f"parallel.virtual={p.virtual} needs parallel.pipeline above 1; set parallel.virtual=1."


def _experts_exist(model: Model, p: ParallelConfig) -> str | None:
    if model.experts or (p.expert == 1 and p.expert_tensor is None):
        return None
    return (
        "parallel.expert and parallel.expert_tensor split experts, and this model has none; leave them out "
        "(parallel.expert=1 parallel.expert_tensor=null)."
    )


def _experts_fit_ranks(model: Model, p: ParallelConfig) -> str | None:
    ranks, size = p.tensor * p.context * p.data, p.expert * p.expert_tensor_size
    if not model.experts or ranks % size == 0:
        return None
    return (
        f"parallel.expert × parallel.expert_tensor = {p.expert} × {p.expert_tensor_size} does not divide the {ranks} "
        f"ranks of a pipeline stage (tensor × context × data); change one of them."
    )


def _sequence_is_needed(model: Model, p: ParallelConfig) -> str | None:
    kinds = {"experts": bool(model.experts), "latent attention": model.latent}
    if model.mixer is not None:
        kinds[f"{model.mixer.name} layers"] = True
    kind = next((kind for kind, present in kinds.items() if present), None)
    if p.tensor == 1 or p.sequence or kind is None:
        return None
    return (
        f"parallel.sequence=false with parallel.tensor={p.tensor}: a model with {kind} would get wrong gradients; set "
        f"parallel.sequence=true."
    )


def _experts_split_alike(model: Model, p: ParallelConfig) -> str | None:
    # Megatron marks experts as replicated when they are not spread over expert ranks; their copies then diverge.
    if not model.experts or p.expert > 1 or p.expert_tensor_size == p.tensor:
        return None
    return (
        f"parallel.expert_tensor={p.expert_tensor_size} differs from parallel.tensor={p.tensor} with "
        f"parallel.expert=1, which Megatron-Core trains wrongly; make them equal or set parallel.expert above 1."
    )


_RULES: tuple[Callable[[Model, ParallelConfig], str | None], ...] = (
    _vocabulary,
    _virtual,
    _experts_exist,
    _experts_fit_ranks,
    _sequence_is_needed,
    _experts_split_alike,
)


def _recompute(model: Model, parallel: ParallelConfig, recompute: Recompute) -> None:
    if isinstance(recompute, int):
        longest = longest_chunk(model.layers, parallel)
        if recompute > longest:
            raise UserError(
                f"policy.recompute={recompute} is above the {longest} layers of the longest "
                f"{'model chunk' if parallel.virtual > 1 else 'pipeline stage'}; lower it, or set "
                f"policy.recompute=full for all layers."
            )
    if not isinstance(recompute, tuple):
        return
    experts, dense = bool(model.experts), not (model.moe_layers and all(model.moe_layers))
    possible = {
        "moe": experts,
        "moe_act": experts,
        "shared_experts": model.shared_ffn > 0,
        "mla_up_proj": model.latent,
        "mlp": dense,
    }
    for module in recompute:
        if not possible.get(module, True):
            raise UserError(f"policy.recompute names {module}, which this model does not have; remove it.")


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Vocabulary rows of the embedding and output weight over all tensor ranks: a multiple of ``tensor``."""
    return -(-vocab_size // tensor) * tensor


_CHUNKS = {False: 1024, True: 4096}
"""`logprob_chunk` without and with CUDA.

Each chunk reads and writes the whole float32 gradient of the output weight. With Qwen3-8B's on an H100 that takes a
fifth as long as the matrix products of 1,024 positions, and a twentieth of 4,096's (from bandwidth and speed of the
products, not measured); the logits of 4,096 positions take 1.2 GB in bfloat16 over all tensor ranks. On a CPU the
products dominate.
"""


def logprob_chunk(policy: PolicyConfig, cuda: bool) -> int:
    """Positions whose logits exist at one time on a rank. ``cuda``: the rank has a CUDA device."""
    return policy.logprob_chunk or _CHUNKS[cuda]


def sequence_alignment(parallel: ParallelConfig) -> int:
    """Multiple of tokens that each sequence of a micro-batch is padded to: context parallelism cuts it into 2 × context
    parts, and each rank gets one from the front and its mirror image from the back.
    """
    return 2 * parallel.context if parallel.context > 1 else 1


def micro_batch_alignment(parallel: ParallelConfig, precision: PrecisionConfig) -> int:
    """Multiple of tokens that a micro-batch is padded to: each context rank's part is cut again into ``tensor`` slices,
    and each slice must suit the precision.
    """
    slices = parallel.tensor if parallel.sequence_parallel else 1
    return token_alignment(precision) * slices * sequence_alignment(parallel)


def check_micro_batch_tokens(micro_batch_tokens: int, parallel: ParallelConfig, precision: PrecisionConfig) -> None:
    """Refuse a capacity that cannot be the width of a micro-batch.

    Raises:
        UserError: ``micro_batch_tokens`` is not a multiple of `micro_batch_alignment`.
    """
    if micro_batch_tokens % (align := micro_batch_alignment(parallel, precision)):
        raise UserError(
            f"policy.micro_batch_tokens={micro_batch_tokens} is not a multiple of {align}, as the parallel "
            f"layout and the precision need; raise it to {-(-micro_batch_tokens // align) * align}."
        )


def layers_of_stages(layers: int, parallel: ParallelConfig) -> list[int]:
    """Transformer layers of each pipeline rank, over all its virtual stages.

    Raises:
        UserError: the layers cannot be split as ``parallel`` specifies.
    """
    p = parallel
    ends = {"first_stage_layers": p.first_stage_layers, "last_stage_layers": p.last_stage_layers}
    given = [n for n in ends.values() if n is not None]
    between, rest = p.pipeline - len(given), layers - sum(given)
    if given and p.pipeline == 1:
        raise UserError(
            f"parallel.{next(k for k, v in ends.items() if v)} has no effect with parallel.pipeline=1; remove it."
        )
    if (between == 0 and rest) or (between and (rest < between or rest % between)):
        fitting = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise UserError(
            f"parallel.pipeline={p.pipeline} with first_stage_layers={p.first_stage_layers} and last_stage_layers="
            f"{p.last_stage_layers} leaves {rest} of num_hidden_layers={layers} of the model's config.json for "
            f"{between} ranks; choose sizes that share them evenly (without uneven ends: parallel.pipeline one of "
            f"{fitting})."
        )
    stages = [rest // between if between else 0] * p.pipeline
    stages[0] = p.first_stage_layers or stages[0]
    stages[-1] = p.last_stage_layers or stages[-1]
    for count in stages:
        if count % p.virtual:
            raise UserError(
                f"parallel.virtual={p.virtual} does not divide the {count} layers of a pipeline rank; choose a divisor."
            )
    return stages


def longest_chunk(layers: int, parallel: ParallelConfig) -> int:
    """Layers of the longest model chunk: of a pipeline rank, or of one of its virtual stages.

    Raises:
        UserError: the layers cannot be split as ``parallel`` specifies.
    """
    return max(layers_of_stages(layers, parallel)) // parallel.virtual
