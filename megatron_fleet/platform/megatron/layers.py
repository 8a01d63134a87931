"""Norm, activation and unsplit linear layer for hosts without Transformer Engine.

Norm and activation are one autograd step each. On a CPU these element-wise layers cost up to a third of the matrix
products; writing gradients in place and keeping one input instead of every intermediate value halves that. On CUDA
PyTorch's own norm is one kernel each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class _RMSNorm(torch.autograd.Function):
    """y = x · r · (center + w) with r = 1/√(mean x² + ε); float32 inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, center: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.center = center
        return (wide * scale).mul_(_gain(weight, center)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, w = grad.float(), _gain(weight, ctx.center)
        normed = x.float() * scale
        product = wide * normed
        # ∂L/∂x = r · (g·w − x̂ · mean(g·w·x̂)) with x̂ = x·r.
        mean = torch.mv(product.flatten(0, -2), w).div_(x.shape[-1]).view(scale.shape)
        of_weight = product.flatten(0, -2).sum(0)
        of_x = torch.mul(wide, w, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None, None


def _gain(weight: torch.Tensor, center: float) -> torch.Tensor:
    return weight.float() + center if center else weight.float()


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) over the last axis, with the constructor Megatron expects.

    Multiplies by the weight, or by 1 + weight where the configuration centres weights at zero.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.center = eps, 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism a rank sees a slice of the tokens: Megatron then sums this gradient over ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[…, hidden_size]``, any float dtype; shape and dtype are preserved."""
        if self._has_kernel(x):
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps, self.center)

    def _has_kernel(self, x: torch.Tensor) -> bool:
        """Whether PyTorch has one kernel for this norm: it takes no weight of another dtype, and 1 + weight in bfloat16
        would lose most of the weight's digits.
        """
        return x.is_cuda and x.dtype == self.weight.dtype and not self.center


class DuplicatedLinear(nn.Module):
    """Linear layer that every tensor-parallel rank holds whole and applies to its own slice of the tokens.

    For the down-projections of latent attention, like Transformer Engine's ``parallel_mode="duplicated"``. Megatron's
    own specification splits them over ranks, and then never sums the gradient of the shared rotary key over the heads.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        **_: Any,
    ) -> None:
        """Raise ValueError for a bias, or for several ranks without sequence parallelism (wrong gradients)."""
        super().__init__()
        if bias:
            raise ValueError("DuplicatedLinear has no bias")
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            raise ValueError("latent attention over several tensor-parallel ranks needs sequence_parallel=True")
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        setattr(self.weight, "allreduce", True)  # noqa: B010
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map ``[…, input_size]`` to ``[…, output_size]``, plus ``None`` in the place of Megatron's bias."""
        return F.linear(x, self.weight), None

    def get_extra_state(self) -> None:
        """Return an empty state: Transformer Engine's layers have this entry in checkpoints."""

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: there is no state to restore."""


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


class SwiGLU(nn.Module):
    """silu(gate) · up of ``[…, gate | up]`` (Shazeer 2020, arXiv:2002.05202), with the constructor Megatron expects."""

    def __init__(self, config: TransformerConfig | None = None) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[…, 2 × n]`` to ``[…, n]``."""
        return _SwiGLU.apply(x)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return an empty dict; Megatron asks every module of a feed-forward layer."""
        return {}
