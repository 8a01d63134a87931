"""Policy losses by name: pure functions of log-probabilities at trained positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class LossInputs:
    """Per-token inputs of a loss at the ``A`` trained positions of one micro-batch; float32 ``[A]`` each.

    ``logprobs`` and ``entropy`` carry gradients. ``proximal`` is ``None`` in the single-forward on-policy case: the
    loss then uses ``logprobs.detach()``. ``reference`` is ``None`` when there is no KL term.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    behaviour: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None


LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The SUM of the loss over positions (scalar, with gradient) and named metric sums (0-d tensors, no gradient)."""

LossFn = Callable[[LossInputs], LossResult]
