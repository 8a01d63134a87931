"""AdamW with the state layout of Transformer Engine's ``FusedAdam``, for hosts without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) over float32 parameters, or over 16-bit ones with master weights.

    Unlike `torch.optim.AdamW`, the step count lives in the parameter group and a parameter's state is exactly
    ``exp_avg`` and ``exp_avg_sq``: Megatron's distributed-optimizer checkpoints rely on it.

    The precision-aware form has the fused optimizer's arguments: moments of a narrower dtype, widened for the step and
    rounded after it; float32 master weights as state ``master_param``; gradients whose dtype differs from their
    parameters', read from ``decoupled_grad``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
        **_: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": torch.float32}
        self._master_weights, self._gradient = master_weights, "decoupled_grad" if use_decoupled_grad else "grad"

    # As decorated by PyTorch, which tells its compiler to leave them alone, they would import it: 0.8 s of CPU.
    add_param_group, state_dict, load_state_dict, _clear_gradients = (
        getattr(torch.optim.Optimizer, name).__wrapped__
        for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad")
    )

    def initialize_state(self, param: torch.Tensor, *_: Any) -> None:
        """Create zero moments; Megatron calls this before it fills them from a checkpoint."""
        for name in _MOMENTS:
            self.state[param][name] = torch.zeros_like(param.data, dtype=self._dtypes[name])
        if self._master_weights:
            self.state[param]["master_param"] = param.detach().float()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._clear_gradients(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                if self._gradient == "decoupled_grad":
                    param.decoupled_grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if getattr(p, self._gradient, None) is not None]
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.initialize_state(p)
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        weights = [self.state[p].get("master_param", p) for p in params]
        moments = {name: [self.state[p][name].float() for p in params] for name in _MOMENTS}
        adamw(
            weights,
            [getattr(p, self._gradient).float() for p in params],
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            [torch.tensor(float(group["step"] - 1)) for _ in params],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, values in moments.items():
            for p, value in zip(params, values, strict=True):
                self.state[p][name].copy_(value)
        for p, weight in zip(params, weights, strict=True):
            p.copy_(weight)
