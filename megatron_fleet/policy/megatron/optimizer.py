"""Gradient buffers and Megatron's distributed optimizer, and one guarded step of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.module import MegatronModule

from megatron_fleet.config.schema import Optimizer


def wrap(chunk: MegatronModule) -> DistributedDataParallel:
    """Give a chunk contiguous parameter and float32 gradient buffers. It takes over the parameters' present values."""
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(chunk.config, settings, chunk)


def build(chunks: Sequence[DistributedDataParallel], optimizer: Optimizer, dtype: torch.dtype) -> ChainedOptimizer:
    """AdamW with moments and float32 master parameters sharded over data-parallel ranks (ZeRO stage 1).

    Moments and step count exist from the start: a run may save before its first update.
    """
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=True,
    )
    chained = get_megatron_optimizer(settings, list(chunks), use_gloo_process_groups=False)
    for part in chained.chained_optimizers:
        part.init_state_fn(part.optimizer, settings)
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)
    return chained


def step(
    chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer, lr: float, clip_grad: float
) -> tuple[float, bool]:
    """Sum gradients over ranks, clip, update, clear.

    Returns:
        The gradient norm before clipping, and whether the update was skipped because that norm is not finite.
    """
    finalize_model_grads(list(chunks))
    for group in optimizer.param_groups:
        group["lr"] = lr
    failed = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    skipped = failed or not math.isfinite(norm)
    if not skipped:
        for part in optimizer.chained_optimizers:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, max_norm=clip_grad, total_norm=norm)
        optimizer.step_with_ready_grads()
    clear(chunks, optimizer)
    return norm, skipped


def clear(chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> None:
    """Zero the gradients."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
