"""Gradient buffers, Megatron's distributed optimizer, and one guarded step of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule

from megatron_fleet.config.schema import OptimizerConfig
from megatron_fleet.trainer.base import AdamParams


def wrap(chunk: MegatronModule, more: Mapping[str, Any] | None = None) -> DistributedDataParallel:
    """Give a chunk contiguous parameter and gradient buffers, initialised with the parameters' current values.

    Args:
        more: further arguments of Megatron's configuration (`PrecisionArguments.gradients`); gradients are float32
            without them.
    """
    arguments: dict[str, Any] = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **(more or {})}
    return DistributedDataParallel(chunk.config, DistributedDataParallelConfig(**arguments), chunk)


def build(
    chunks: Sequence[DistributedDataParallel],
    optimizer: OptimizerConfig,
    dtype: torch.dtype,
    more: Mapping[str, Any] | None = None,
) -> ChainedOptimizer:
    """AdamW with moments and float32 master parameters sharded over data-parallel ranks (ZeRO stage 1).

    Moments and step count exist from the start: a run may save before its first update.

    Args:
        more: further arguments of Megatron's configuration (`PrecisionArguments.optimizer`).
    """
    arguments: dict[str, Any] = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_distributed_optimizer": True,
        **(more or {}),
    }
    settings = MegatronOptimizerConfig(**arguments)
    chained = get_megatron_optimizer(settings, list(chunks), use_gloo_process_groups=False)
    for part in chained.chained_optimizers:
        _start_moments(part, settings)
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)
    return chained


def _start_moments(part: DistributedOptimizer, settings: MegatronOptimizerConfig) -> None:
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        # Its own way of creating them is a step with random gradients.
        for sub in part.optimizer.sub_optimizers:
            for param in (param for group in sub.param_groups for param in group["params"]):
                sub.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                if isinstance(sub, torch.optim.AdamW):
                    sub.state[param]["step"] = torch.zeros((), device=param.device)
        part.optimizer._sync_sub_optimizers_state_to_hdo()
    elif settings.use_precision_aware_optimizer:
        for param in (param for group in part.optimizer.param_groups for param in group["params"]):
            part.optimizer.initialize_state(param, settings.store_param_remainders)
    else:
        part.init_state_fn(part.optimizer, settings)


@dataclass(frozen=True, slots=True)
class ReducedGradients:
    """Gradients after the reduction over ranks, with nothing updated yet.

    Attributes:
        norm: before clipping; infinite when a gradient is not finite.
        biases: the routers' biases as the step would leave them.
    """

    norm: float
    biases: list[torch.Tensor]


def reduce_gradients(chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> ReducedGradients:
    """Reduce gradients over ranks. The model stays as it is; follow with `step` or `clear`."""
    biases = _expert_biases(chunks)
    before = [bias.clone() for bias in biases]
    finalize_model_grads(list(chunks))
    # Megatron updates the routers' biases here already, before it is known whether the step is taken.
    after = _exchange(biases, before)
    norm = math.inf if optimizer.prepare_grads() else float(optimizer.get_grad_norm())
    return ReducedGradients(norm, after)


def step(
    chunks: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    reduced: ReducedGradients,
    adam: AdamParams,
) -> bool:
    """Clip, update, clear. Returns whether the update was skipped because the norm is not finite."""
    skipped = not math.isfinite(reduced.norm)
    if not skipped:
        _exchange(_expert_biases(chunks), reduced.biases)
        for group in optimizer.param_groups:
            group["lr"], group["betas"], group["eps"] = adam.lr, adam.betas, adam.eps
            # Norms and biases do not decay. Megatron leaves this to a scheduler, which is not used here.
            group["weight_decay"] = adam.weight_decay * group["wd_mult"]
        for part in optimizer.chained_optimizers:
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters,
                    max_norm=adam.clip_grad,
                    total_norm=reduced.norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        with _gathered_once(chunks, optimizer):
            optimizer.step_with_ready_grads()
    clear(chunks, optimizer)
    return skipped


@contextmanager
def _gathered_once(chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> Iterator[None]:
    """All-gather the updated parameters once, at the end. Dense parameters and experts have an optimizer each, and each
    of Megatron's (0.16 to 0.19) would gather the parameters of both.
    """
    if len(optimizer.chained_optimizers) == 1:
        yield
        return
    names = ("start_param_sync", "_start_bucket_group_param_sync")  # 0.19 takes the second
    for chunk in chunks:
        vars(chunk).update(dict.fromkeys(names, _wait))
    try:
        yield
    finally:
        for chunk in chunks:
            for name in names:
                del vars(chunk)[name]
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:  # `ParameterOverlap` starts it
            chunk.start_param_sync()


def _wait(*_: Any, **__: Any) -> None:
    """Do nothing."""


def _expert_biases(chunks: Sequence[DistributedDataParallel]) -> list[torch.Tensor]:
    found = (getattr(module, "expert_bias", None) for chunk in chunks for module in chunk.modules())
    return [bias for bias in found if isinstance(bias, torch.Tensor)]


@torch.no_grad()
def _exchange(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fill ``tensors`` with ``values``; returns their previous values."""
    previous = [tensor.clone() for tensor in tensors]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
    return previous


def clear(chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> None:
    """Zero the gradients."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
