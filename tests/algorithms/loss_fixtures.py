"""Sequences with four policies, the inputs that a micro-batch of them makes, and textbook reductions in plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_fleet.algorithms.loss_inputs import LossInputs

LENGTHS = (3, 1, 6, 2, 5, 4)
ADVANTAGES = (1.3, -0.7, -1.1, 0.4, 0.9, -0.6)
CONSTANT = 7.0


@dataclass
class Sample:
    """One sequence; log-probs float64 ``[T]``. ``logprobs`` and ``entropy`` are leaves with gradients."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    advantage: float

    def __len__(self) -> int:
        return len(self.logprobs)


def samples(
    update: float = 0.5, mismatch: float = 0.3, seed: int = 3, dtype: torch.dtype = torch.float64
) -> list[Sample]:
    """``update`` is the scale of log π/π_old, ``mismatch`` that of log π_old/μ; 0 makes the two policies equal."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for length, advantage in zip(LENGTHS, ADVANTAGES, strict=True):

        def normal(scale: float, n: int = length) -> torch.Tensor:
            return (scale * torch.randn(n, generator=g, dtype=torch.float64)).to(dtype)

        logprobs = -2 + normal(0.8)
        old = logprobs + normal(update)
        out.append(
            Sample(
                logprobs=logprobs.clone().requires_grad_(),
                entropy=normal(1).abs().requires_grad_(),
                old=old,
                behaviour=old + normal(mismatch),
                reference=logprobs + normal(0.6),
                advantage=advantage,
            )
        )
    return out


def normalisers(batch: Sequence[Sample], reduction: str) -> list[float]:
    """Values of ``mask`` at the trained positions of each sequence, when ``batch`` is the global batch."""
    total = sum(len(s) for s in batch)
    by_name = {
        "token_mean": [1 / total for _ in batch],
        "sequence_mean": [1 / (len(batch) * len(s)) for s in batch],
        "constant": [1 / (len(batch) * CONSTANT) for _ in batch],
    }
    return by_name[reduction]


def pack(
    micro_batch: Sequence[Sample], scales: Sequence[float], proximal: bool = True, reference: bool = False
) -> LossInputs:
    """One micro-batch; gradients arrive at the samples' own leaves."""

    def joined(pieces: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.float64, requires_grad=True)

    like = [torch.ones_like(s.old) for s in micro_batch]
    arrays = {"proximal": joined([s.old for s in micro_batch]).detach()} if proximal else {}
    arrays |= {"reference": joined([s.reference for s in micro_batch]).detach()} if reference else {}
    return LossInputs(
        logprobs=joined([s.logprobs for s in micro_batch]),
        entropy=joined([s.entropy for s in micro_batch]),
        loss_scale=joined([m * one for m, one in zip(scales, like, strict=True)]).detach(),
        scaled_advantages=joined(
            [m * s.advantage * one for s, m, one in zip(micro_batch, scales, like, strict=True)]
        ).detach(),
        behaviour=joined([s.behaviour for s in micro_batch]).detach(),
        sequence=torch.tensor([i for i, s in enumerate(micro_batch) for _ in range(len(s))], dtype=torch.int64),
        sequences=len(micro_batch),
        arrays=arrays,
    )


def reduced(gains: Sequence[Sequence[torch.Tensor]], reduction: str) -> torch.Tensor:
    """The papers' objectives from per-token gains (advantage inside) of each sequence: nested means, no normaliser."""
    per_sequence = [sum(g, torch.zeros((), dtype=torch.float64)) for g in gains]
    if reduction == "sequence_mean":
        return sum(s / len(g) for s, g in zip(per_sequence, gains, strict=True)) / len(gains)
    if reduction == "constant":
        return sum(s / CONSTANT for s in per_sequence) / len(gains)
    return sum(per_sequence) / sum(len(g) for g in gains)


def gradients(batch: Sequence[Sample]) -> torch.Tensor:
    """Gradients of all log-probs, and clears them."""
    found = [torch.zeros_like(s.logprobs) if s.logprobs.grad is None else s.logprobs.grad.clone() for s in batch]
    for s in batch:
        s.logprobs.grad = s.entropy.grad = None
    return torch.cat(found)
