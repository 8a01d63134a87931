"""Inputs and result of every loss, with sums over the sequences of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from megatron_fleet.algorithms.loss_metrics import MAX_LOG_RATIO


@dataclass(slots=True)
class LossInputs:
    """Per-token inputs of a loss at the ``A`` trained positions of one micro-batch; float32 ``[A]`` unless noted.

    All trained positions of a sequence are in one micro-batch, so sums over a sequence need no communication.

    Attributes:
        logprobs: log π, with gradient.
        entropy: entropy of π in nats, with gradient.
        loss_scale: the normaliser, above 0 and equal at all positions of a sequence.
        scaled_advantages: advantage × normaliser.
        behaviour: log μ.
        sequence: int64 ``[A]``, below ``sequences``: index of the sequence that a position belongs to.
        sequences: sequences in the micro-batch; some may have no trained position.
        arrays: further values by name, see `Datum.arrays`.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    loss_scale: torch.Tensor
    scaled_advantages: torch.Tensor
    behaviour: torch.Tensor
    sequence: torch.Tensor
    sequences: int
    arrays: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def array(self, name: str) -> torch.Tensor | None:
        """Return further values by name; ``None``: the data have none. Without any position there are all, empty."""
        found = self.arrays.get(name)
        return self.behaviour if found is None and len(self.behaviour) == 0 else found

    @property
    def proximal(self) -> torch.Tensor | None:
        """log π_old; ``None`` = the single-forward on-policy case, π_old := stop-grad(π)."""
        return self.array("proximal")

    @property
    def reference(self) -> torch.Tensor | None:
        """log π_ref; ``None`` when there is no KL term."""
        return self.array("reference")

    @property
    def staleness(self) -> torch.Tensor | None:
        """Weight versions since a token was sampled; ``None`` = 0 everywhere."""
        return self.array("staleness")

    def old_logprobs(self) -> torch.Tensor:
        """log π_old, without gradient."""
        return self.logprobs.detach() if self.proximal is None else self.proximal

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of ``values`` ``[A]`` over each sequence, ``[sequences]``, in the dtype of ``values``; no gradient."""
        # Atomic additions on CUDA happen in arbitrary order; in float64 the effect is lost in the rounding to the
        # result.
        sums = torch.zeros(self.sequences, dtype=torch.float64, device=values.device)
        return sums.index_add_(0, self.sequence, values.detach().double()).to(values.dtype)

    def sequence_counts(self) -> torch.Tensor:
        """Trained positions of each sequence, ``[sequences]``."""
        return self.sequence_sums(torch.ones_like(self.loss_scale))

    def at_positions(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """Broadcast values ``[sequences]`` to the trained positions of each sequence, ``[A]``."""
        return per_sequence[self.sequence]

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of ``values`` ``[A]`` over the trained positions of a sequence, at each of these positions: ``[A]``."""
        return self.at_positions(self.sequence_sums(values) / self.sequence_counts())


LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The SUM of the loss over positions (scalar, with gradient) and named metric sums (0-d tensors, no gradient)."""

LossFn = Callable[[LossInputs], LossResult]


def bounded_log_ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """log(above / below) of two log-probs ``[A]``, clamped so that its exponential is finite in float32."""
    return (above - below).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def count(where: torch.Tensor) -> torch.Tensor:
    """Number of true entries in a bool tensor: float32, 0-d."""
    return where.sum(dtype=torch.float32)
