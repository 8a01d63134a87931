"""Corrections for the gap between the engine that sampled (μ) and the trainer that learns (π_old), by name.

With ρ_t = π_old/μ (π_old = stop-grad(π) when no pass computed it), each gives a weight c_t without gradient, and the
policy term becomes −Σ_t c_t·J_t; KL and entropy terms are not weighted. Tokens with c_t = 0 still count in the
normaliser, as in IcePop, whose 1/Σ|y| runs over all tokens: masking one token does not change the weight of any other.
A NaN ratio, e.g. where the engine returned NaN for log μ, is outside all bounds and gets weight 0.

| kind           | c_t                                                     | source                             |
|----------------|---------------------------------------------------------|------------------------------------|
| token_tis      | min(ρ_t, high)                                          | Yao et al. 2025, TIS, see below    |
| sequence_tis   | min(Π ρ over the sequence, high)                        | Liu, Li et al. 2025, see below     |
| icepop         | ρ_t if low ≤ ρ_t ≤ high, else 0                         | Ring-1T, arXiv:2510.18855          |
| geometric_mask | 1 if low ≤ (Π ρ over the sequence)^(1/T) ≤ high, else 0 | Liu, Li et al. 2025, see below     |
| outlier_mask   | 1 if low ≤ ρ ≤ high at every token of it, else 0        | SkyRL's outlier token mask         |

Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", fengyao.notion.site.
Liu, Li et al. 2025, "When Speed Kills Stability", richardli.xyz/rl-collapse, parts 2 and 3.
Default bounds are in `megatron_fleet.config.schema.CORRECTION_BOUNDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from megatron_fleet.algorithms.loss_inputs import LossInputs, count
from megatron_fleet.config.schema import CorrectionConfig

Weights = tuple[torch.Tensor, torch.Tensor]
"""c_t ``[A]``, and bool ``[A]``: whether the weight was truncated or set to 0."""


def token_tis(x: LossInputs, log_ratio: torch.Tensor, low: float, high: float) -> Weights:
    return _truncated(log_ratio, high)


def sequence_tis(x: LossInputs, log_ratio: torch.Tensor, low: float, high: float) -> Weights:
    return _truncated(x.at_positions(x.sequence_sums(log_ratio)), high)


def icepop(x: LossInputs, log_ratio: torch.Tensor, low: float, high: float) -> Weights:
    outside = _outside(log_ratio, low, high)
    return torch.exp(log_ratio).masked_fill(outside, 0.0), outside


def geometric_mask(x: LossInputs, log_ratio: torch.Tensor, low: float, high: float) -> Weights:
    return _left_out(_outside(x.sequence_means(log_ratio), low, high), log_ratio)


def outlier_mask(x: LossInputs, log_ratio: torch.Tensor, low: float, high: float) -> Weights:
    outliers = _outside(log_ratio, low, high).to(log_ratio.dtype)
    return _left_out(x.at_positions(x.sequence_sums(outliers)) > 0, log_ratio)


CORRECTIONS: dict[str, Callable[[LossInputs, torch.Tensor, float, float], Weights]] = {
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "icepop": icepop,
    "geometric_mask": geometric_mask,
    "outlier_mask": outlier_mask,
}
"""Map from kind to the function of inputs, log ρ ``[A]`` without gradient, low and high that returns the weights."""


def correction_weights(x: LossInputs, correction: CorrectionConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """c_t ``[A]`` without gradient, and metric sums; ``correction.kind`` is not ``off``."""
    weight, touched = CORRECTIONS[correction.kind](x, x.old_logprobs() - x.behaviour, *correction.bounds)
    return weight, {
        "correction_weight": weight.sum(),
        "correction_weight_squared": weight.square().sum(),
        "corrected_tokens": count(touched),
        "corrected_sequences": count(x.sequence_sums(touched.to(weight.dtype)) > 0),
        "sequences": count(x.sequence_counts() > 0),
    }


def _truncated(log_ratio: torch.Tensor, high: float) -> Weights:
    weight = torch.exp(log_ratio).clamp(max=high).masked_fill(torch.isnan(log_ratio), 0.0)
    return weight, ~(log_ratio <= math.log(high))


def _left_out(touched: torch.Tensor, like: torch.Tensor) -> Weights:
    return torch.ones_like(like).masked_fill(touched, 0.0), touched


def _outside(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ~((log_ratio >= math.log(low)) & (log_ratio <= math.log(high)))  # so that NaN is outside
