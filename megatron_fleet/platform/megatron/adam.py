"""AdamW with the state layout of Transformer Engine's ``FusedAdam``, for hosts without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) over float32 parameters.

    Unlike `torch.optim.AdamW`, the step count lives in the parameter group and a parameter's state is exactly
    ``exp_avg`` and ``exp_avg_sq``: Megatron's distributed-optimizer checkpoints rely on it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)

    def initialize_state(self, param: torch.Tensor, *_: Any) -> None:
        """Zero moments; Megatron calls it before it fills them from a checkpoint."""
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros_like(param.data, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
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
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
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
