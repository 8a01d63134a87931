"""INT4 fake quantisation of routed experts: they compute with the rounded values of their weights.

The arithmetic of Kimi's quantisation-aware training, defined on BF16: groups of 32 inputs of a row, scale =
bf16(fp32(greatest magnitude) / 7), code = round(w / scale), value = bf16(code · scale); a group of zeros stays zero.
INT4 weights that were produced by it are unchanged by it. Exports contain the values, not the underlying weights, and
values are exactly representable: an engine that serves them packed computes with the same values as the trainer.
Gradients pass straight through the rounding (Bengio et al. 2013, arXiv:1308.3432).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import PolicyConfig
from megatron_fleet.weights.adapters import View
from megatron_fleet.weights.mapping import Interval
from megatron_fleet.weights.quant import torch_ops


def int4_values(weights: torch.Tensor) -> torch.Tensor:
    """Round ``[rows, cols]`` of any float dtype to its INT4 values, same dtype; ``cols`` is a multiple of 32."""
    exact = weights.to(torch.bfloat16)
    scales = torch_ops.int4_group_scales(exact)
    return torch_ops.int4_dequantize(torch_ops.int4_quantize(exact, scales), scales).to(weights.dtype)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor) -> torch.Tensor:
        return int4_values(weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


@contextlib.contextmanager
def _computed_again(quantised: dict[int, torch.Tensor]) -> Iterator[None]:
    """Make autograd save parameters instead of their quantised values inside, and recompute the latter when needed: no
    copy of the experts lives from the forward pass to the backward pass.

    Args:
        quantised: address of the quantised values → the parameter; filled inside.
    """

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        weight = quantised.get(tensor.data_ptr())
        known = weight is not None and tensor.shape == weight.shape and tensor.is_contiguous()
        return (weight.detach(), True) if known and weight is not None else (tensor, False)

    def unpack(kept: tuple[torch.Tensor, bool]) -> torch.Tensor:
        tensor, was_quantised = kept
        return int4_values(tensor) if was_quantised else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _quantise_linear(linear: ColumnParallelLinear | RowParallelLinear) -> None:
    """Quantise the weight of Megatron's own layer, which passes it to one function."""
    layer: Any = linear
    compute = layer._forward_impl

    def forward(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        values = _StraightThrough.apply(weight)
        with _computed_again({values.data_ptr(): weight}):
            return compute(input, values, *args, **kwargs)

    layer._forward_impl = forward


def _quantise_grouped(linear: nn.Module) -> None:
    """Quantise Transformer Engine's grouped layer, which calls its own method for the list of its experts' weights."""
    layer: Any = linear
    compute, weights_of = layer.forward, layer._get_weight_tensors
    quantised: dict[int, torch.Tensor] = {}

    def quantised_weights() -> list[torch.Tensor]:
        weights = weights_of()
        values = [_StraightThrough.apply(weight) for weight in weights]
        quantised.update({v.data_ptr(): w for v, w in zip(values, weights, strict=True)})
        return values

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _computed_again(quantised):
            try:
                return compute(*args, **kwargs)
            finally:
                quantised.clear()

    layer._get_weight_tensors, layer.forward = quantised_weights, forward


def _linears(chunk: nn.Module) -> Iterator[nn.Module]:
    for name, module in chunk.named_modules():
        parts = name.split(".")
        if parts[0] == "decoder" and "experts" in parts and parts[-1] in ("linear_fc1", "linear_fc2"):
            yield module


def quantise_experts(chunks: Sequence[MegatronModule], settings: PolicyConfig) -> dict[torch.Tensor, View]:
    """Make routed experts compute with INT4 values if ``settings`` require it; after filling and freezing.

    Frozen experts are rounded once, in place; trained ones in every pass.

    Returns:
        Views of the experts for exports: the values that the forward pass computes with.

    Raises:
        UserError: the model has no experts, or a rank's part of their rows does not end at a group boundary.
    """
    views: dict[torch.Tensor, View] = {}
    if settings.fake_quant == "none":
        return views
    _check(chunks[0].config)
    for linear in (linear for chunk in chunks for linear in _linears(chunk)):
        weights = list(linear.parameters(recurse=False))
        if not any(weight.requires_grad for weight in weights):
            with torch.no_grad():
                for weight in weights:
                    weight.copy_(int4_values(weight))
            continue
        if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
            _quantise_linear(linear)
        else:
            _quantise_grouped(linear)
        views |= dict.fromkeys(weights, _int4_view)
    return views


def _int4_view(values: torch.Tensor, _: Interval) -> torch.Tensor:
    return int4_values(values)


def _check(config: TransformerConfig) -> None:
    if not config.num_moe_experts:
        raise UserError("policy.fake_quant=int4_experts, and this model has no experts; set policy.fake_quant=none.")
    width, size = config.moe_ffn_hidden_size or 0, config.expert_tensor_parallel_size or 1
    if config.hidden_size % torch_ops.GROUP or width // size % torch_ops.GROUP:
        raise UserError(
            f"policy.fake_quant=int4_experts needs rows of a multiple of {torch_ops.GROUP} inputs on every rank: "
            f"hidden_size={config.hidden_size}, moe_intermediate_size={width} over {size} ranks; lower "
            f"parallel.expert_tensor or set policy.fake_quant=none."
        )
