"""Stand-in for ``transformer_engine.pytorch``: modules with the real ones' parameters, in the real ones' order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transformer_engine.pytorch import distributed, fp8, ops

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm", "distributed", "fp8", "ops"]


class _Module(nn.Module):
    """A module whose quantisation state is saved beside its parameters; without FP8 that state is empty."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


def _local(in_features: int, out_features: int, parallel_mode: str | None, tp_size: int) -> tuple[int, int]:
    """This rank's ``(out, in)``."""
    rows = out_features // tp_size if parallel_mode == "column" else out_features
    return rows, in_features // tp_size if parallel_mode == "row" else in_features


def _zeros(*shape: int | None, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


class Linear(_Module):
    """``weight`` ``[out, in]``, ``bias`` ``[out]``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.use_bias, self.parallel_mode = bias, parallel_mode
        out, inner = _local(in_features, out_features, parallel_mode, tp_size)
        self.weight = _zeros(out, inner, dtype=params_dtype)
        if bias:
            self.bias = _zeros(out, dtype=params_dtype)


class LayerNormLinear(Linear):
    """A norm over the input (``layer_norm_weight`` ``[in]``, ``layer_norm_bias`` unless RMSNorm) and a linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        normalization: str = "LayerNorm",
        params_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **kwargs)
        self.layer_norm_weight = _zeros(in_features, dtype=params_dtype)
        if normalization != "RMSNorm":
            self.layer_norm_bias = _zeros(in_features, dtype=params_dtype)


class GroupedLinear(_Module):
    """``weight0`` … ``weight{n-1}``, each ``[out, in]``, and biases alike; one extra state for all."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        parallel_mode: str | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        self.fp8_meta = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False
        out, inner = _local(in_features, out_features, parallel_mode, tp_size)
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", _zeros(out, inner, dtype=params_dtype))
            if bias:
                self.register_parameter(f"bias{i}", _zeros(out, dtype=params_dtype))


class RMSNorm(_Module):
    """``weight`` ``[normalized_shape]``, once called ``hidden_size``."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        hidden_size: int | None = None,
        params_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.weight = _zeros(normalized_shape or hidden_size, dtype=params_dtype)


class DotProductAttention(_Module):
    """No parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
