"""Norm and activation for hosts without Transformer Engine, each as one autograd step.

On a CPU these element-wise layers cost as much as a third of the matrix products; writing gradients in place and
keeping one input instead of every intermediate value halves that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class _RMSNorm(torch.autograd.Function):
    """y = x · r · w with r = 1/√(mean x² + ε); float32 inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, w = grad.float(), weight.float()
        normed = x.float() * scale
        product = wide * normed
        # ∂L/∂x = r · (g·w − x̂ · mean(g·w·x̂)) with x̂ = x·r.
        mean = torch.mv(product.flatten(0, -2), w).div_(x.shape[-1]).view(scale.shape)
        of_weight = product.flatten(0, -2).sum(0)
        of_x = torch.mul(wide, w, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) over the last axis, with the constructor Megatron expects."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism a rank sees a slice of the tokens: Megatron then sums this gradient over ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, hidden_size]``, any float dtype, to the same."""
        return _RMSNorm.apply(x, self.weight, self.eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, activated = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        of_x = torch.empty_like(x)
        of_gate, of_up = of_x.chunk(2, -1)
        torch.mul(grad, activated, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return of_x


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of ``[…, gate | up]`` (Shazeer 2020, arXiv:2002.05202)."""
    return _SwiGLU.apply(x)
