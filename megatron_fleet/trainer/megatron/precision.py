"""Megatron-Core arguments for precision and optimizer variants, and lossless filling of FP8 weights.

Field names are those of Megatron-Core 0.16.1 and 0.19.2, which agree in all that is used here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core import fp8_utils
from torch import nn

from megatron_fleet.config.schema import OptimizerConfig, PrecisionConfig

_FORMATS = {"fp8_tensorwise": "hybrid", "fp8_blockwise": "e4m3", "fp8_delayed": "hybrid"}
"""Blocks are narrow enough for e4m3 in the gradients too; per-tensor scales need e5m2's range for them."""


class PrecisionArguments(NamedTuple):
    """Further arguments of ``TransformerConfig``, ``DistributedDataParallelConfig`` and ``OptimizerConfig``."""

    transformer: dict[str, Any]
    gradients: dict[str, Any]
    optimizer: dict[str, Any]


def precision_arguments(precision: PrecisionConfig, optimizer: OptimizerConfig, experts: bool) -> PrecisionArguments:
    """Megatron's arguments beyond the model and the layout.

    Args:
        experts: the model has routed experts; FP8 then pads the tokens of each.
    """
    return PrecisionArguments(
        _transformer(precision, experts),
        {
            "grad_reduce_in_fp32": precision.gradients == "float32",
            "fp8_param_gather": precision.fp8_param_gather,
        },
        _optimizer(precision, optimizer),
    )


def _transformer(precision: PrecisionConfig, experts: bool) -> dict[str, Any]:
    if not precision.fp8:
        return {}
    arguments: dict[str, Any] = {
        "fp8": _FORMATS[precision.recipe],
        "fp8_recipe": precision.recipe.removeprefix("fp8_"),
        "fp8_param": precision.fp8_param_gather,
        "first_last_layers_bf16": bool(precision.bf16_layers_at_start or precision.bf16_layers_at_end),
        "num_layers_at_start_in_bf16": precision.bf16_layers_at_start,
        "num_layers_at_end_in_bf16": precision.bf16_layers_at_end,
    }
    if precision.recipe == "fp8_delayed":
        # Megatron's default is the last step's largest value alone, which the next step may exceed.
        arguments |= {"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
    if experts:
        arguments["moe_router_padding_for_quantization"] = True
    return arguments


def _optimizer(precision: PrecisionConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if precision.fp8_param_gather:
        # The optimizer needs the recipe only for weights that are stored in FP8.
        arguments["fp8_recipe"] = precision.recipe.removeprefix("fp8_")
    if optimizer.offload_fraction > 0:
        arguments |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": optimizer.offload_fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    if optimizer.offload_fraction > 0 or optimizer.moments != "float32":
        moments = getattr(torch, optimizer.moments)
        arguments |= {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": getattr(torch, precision.gradients),
            "exp_avg_dtype": moments,
            "exp_avg_sq_dtype": moments,
            # Stored as the 16 bits that bfloat16 lacks, master weights could not be restored from a checkpoint:
            # Megatron writes those bits where it expects the weights.
            "store_param_remainders": False,
        }
    return arguments


@contextmanager
def filled_in_full(chunks: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Replace FP8 parameters by plain ones inside, to be filled as any other; on exit they take over the values.

    They keep the values lost in this conversion until the optimizer has made its master weights. Otherwise the master
    weights would be those that the layers were built with.
    """
    swapped: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None and fp8_utils.is_float8tensor(parameter):
                plain = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=parameter.device))
                swapped.append((module, name, parameter, plain))
    for module, name, _, plain in swapped:
        module._parameters[name] = plain
    try:
        yield
    finally:
        for module, name, parameter, _ in swapped:
            module._parameters[name] = parameter
    with torch.no_grad():
        for _, _, parameter, plain in swapped:
            parameter.copy_(plain)
            parameter._high_precision_init_val = plain.detach().cpu()  # type: ignore[attr-defined]
