"""The policy terms of a loss, by name: each a formula from one paper, as an objective per token.

Notation: π current, π_old proximal, μ behaviour policy; ρ_t = π/π_old of token t; sg = stop-gradient; T trained tokens
of a sequence. Every term returns J_t ``[A]`` with the advantage and the normaliser inside: w_t = A·m_t. The loss is
−Σ_t J_t. With m_t as `megatron_fleet.algorithms.batch` makes it, Σ_t w_t·g_t is, for any per-token g_t,

* sequence_mean, m = 1/(N·T): (1/N) Σ_i (1/T_i) Σ_t A_i·g_t, the form of GRPO, GSPO, GMPO and SAPO;
* token_mean, m = 1/ΣT: (1/ΣT) Σ_i Σ_t A_i·g_t, the form of DAPO and CISPO;
* constant, m = 1/(N·C): (1/N) Σ_i (1/C) Σ_t A_i·g_t, the form of Dr. GRPO.

Terms with one ratio per sequence (gspo, gmpo) have the same g_i at all its tokens, so a sequence weighs
W_i = Σ_t w_t = A_i/N, A_i·T_i/ΣT or A_i·T_i/(N·C): the papers' objective with the mean over sequences, and the same
objective with sequences weighted by length otherwise. Their gradient is spread over tokens by sg[g_i]·π/sg[π], as
GSPO-token does (arXiv:2507.18071 §4.3), so a token's own weight scales its own gradient.

On the first update (π = π_old = μ) the gradient of every term is that of REINFORCE: −Σ_t w_t·∇log π_t.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from megatron_fleet.algorithms.loss_inputs import LossInputs, bounded_log_ratio, count
from megatron_fleet.config.extension import Interface
from megatron_fleet.config.schema import AlgorithmConfig

TermResult = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""J_t ``[A]`` with gradient, and named metric sums (0-d, no gradient)."""


class PolicyTerm(Protocol):
    def __call__(self, inputs: LossInputs, algorithm: AlgorithmConfig, /) -> TermResult:
        """Return the objective J_t ``[A]`` of a micro-batch's trained tokens, and named metric sums.

        The advantage and the normaliser are inside; the negated sum of J_t is the loss.
        """
        ...


OWN_LOSS = Interface("algorithm.loss", "loss", PolicyTerm, "trainer ranks")


def ppo_clip(x: LossInputs, algo: AlgorithmConfig) -> TermResult:
    """J_t = min(ρ·w, clip(ρ, 1−ε_low, 1+ε_high)·w); with a dual clip and w < 0: max(that, c·w).

    PPO: Schulman et al. 2017, arXiv:1707.06347 eq. 7. Separate bounds (clip-higher): DAPO, arXiv:2503.14476 §3.1.
    Dual clip: Ye et al. 2020, arXiv:1912.09729 eq. 5. The normaliser in w is positive, so min is that of PPO.
    """
    ratio = torch.exp(bounded_log_ratio(x.logprobs, x.old_logprobs()))
    gain, sums = _clipped(ratio, x, algo)
    dual = torch.zeros_like(x.scaled_advantages, dtype=torch.bool)
    if algo.dual_clip is not None:
        # A bad token that became much likelier must not dominate.
        dual = (x.scaled_advantages < 0) & (ratio > algo.dual_clip)
        gain = torch.where(x.scaled_advantages < 0, torch.maximum(gain, algo.dual_clip * x.scaled_advantages), gain)
    return gain, sums | {"clipped_dual": count(dual)}


def gspo(x: LossInputs, algo: AlgorithmConfig) -> TermResult:
    """J_t = min(s·w, clip(s, 1−ε_low, 1+ε_high)·w), s = exp(mean over the sequence of log ρ).

    GSPO: Zheng et al. 2025, arXiv:2507.18071 §4.1; clipping applies to whole sequences.
    """
    log_s = x.sequence_means(bounded_log_ratio(x.logprobs, x.old_logprobs()))
    ratio = torch.exp(log_s) * _one_with_gradient(x.logprobs)
    return _clipped(ratio, x, algo)


def gmpo(x: LossInputs, algo: AlgorithmConfig) -> TermResult:
    """J_t = w·exp(mean over the sequence of log ρ'), ρ' = min(ρ, 1+ε_high) for A > 0 and max(ρ, 1−ε_low) for A < 0.

    GMPO: Zhao et al. 2025, arXiv:2507.20673: the geometric mean of the clipped token ratios; a clipped token keeps
    its place in the mean and loses its gradient.
    """
    smallest, largest = algo.ratio_bounds
    log_smallest = math.log(smallest) if smallest > 0 else -math.inf
    log_ratio = bounded_log_ratio(x.logprobs, x.old_logprobs())
    used = torch.where(
        x.scaled_advantages > 0, log_ratio.clamp(max=math.log(largest)), log_ratio.clamp(min=log_smallest)
    )
    ratio = torch.exp(x.sequence_means(used)) * _one_with_gradient(used)
    sums = {
        "clipped_low": count((x.scaled_advantages < 0) & (log_ratio < log_smallest)),
        "clipped_high": count((x.scaled_advantages > 0) & (log_ratio > math.log(largest))),
        "ratio": ratio.detach().sum(),
    }
    return ratio * x.scaled_advantages, sums


def cispo(x: LossInputs, algo: AlgorithmConfig) -> TermResult:
    """J_t = w·sg[clip(ρ, 1−ε_low, 1+ε_high)]·log π: the ratio's weight is truncated, and every token keeps its
    gradient.

    CISPO: MiniMax-M1, arXiv:2506.13585 §3.1.
    """
    smallest, largest = algo.ratio_bounds
    ratio = torch.exp(bounded_log_ratio(x.logprobs.detach(), x.old_logprobs()))
    return x.scaled_advantages * ratio.clamp(smallest, largest) * x.logprobs, _outside(ratio, smallest, largest)


def reinforce(x: LossInputs, algo: AlgorithmConfig) -> TermResult:
    """J_t = w·log π. Williams 1992, "Simple statistical gradient-following algorithms", Machine Learning 8."""
    return x.scaled_advantages * x.logprobs, {}


def importance_weighted(x: LossInputs, algo: AlgorithmConfig) -> TermResult:
    """J_t = r·w where 1−ε_low ≤ r ≤ 1+ε_high and 0 elsewhere, r = π/μ: one forward pass, however stale the samples are.

    Masked importance sampling against the sampler itself: INTELLECT-3, arXiv:2512.16144 eq. 1, after IcePop (Ring-1T,
    arXiv:2510.18855). A token whose log μ is NaN gets r = 0, so it is masked.
    """
    smallest, largest = algo.ratio_bounds
    log_ratio = bounded_log_ratio(x.logprobs, x.behaviour)
    # Masking the result alone is not enough: the gradient of a NaN exponential would be NaN times 0.
    unknown = torch.isnan(log_ratio)
    ratio = torch.exp(log_ratio.masked_fill(unknown, 0.0)).masked_fill(unknown, 0.0)
    kept = ~unknown & (ratio >= smallest) & (ratio <= largest)
    sums = _outside(ratio.detach(), smallest, largest) | {"clipped_low": count(unknown | (ratio < smallest))}
    return torch.where(kept, ratio * x.scaled_advantages, 0.0), sums


def sapo(x: LossInputs, algo: AlgorithmConfig) -> TermResult:
    """J_t = w·(4/τ)·sigmoid(τ·(ρ − 1)), τ = tau_positive for A > 0, tau_negative otherwise: a gate instead of a clip.

    SAPO: Gao et al. 2025, arXiv:2511.20347. Its slope at ρ = 1 is 1 for any τ.
    """
    ratio = torch.exp(bounded_log_ratio(x.logprobs, x.old_logprobs()))
    tau = torch.full_like(ratio, algo.tau_negative).masked_fill(x.scaled_advantages > 0, algo.tau_positive)
    return x.scaled_advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, {"ratio": ratio.detach().sum()}


POLICY_TERMS: dict[str, PolicyTerm] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "reinforce": reinforce,
    "importance_weighted": importance_weighted,
}


def _one_with_gradient(values: torch.Tensor) -> torch.Tensor:
    """exp(v − sg[v]): 1, with the gradient of ``values``."""
    return torch.exp(values - values.detach())


def _clipped(ratio: torch.Tensor, x: LossInputs, algo: AlgorithmConfig) -> TermResult:
    """Minimum of the unclipped and the clipped objective (PPO), for token or sequence ratios."""
    smallest, largest = algo.ratio_bounds
    gain = torch.minimum(ratio * x.scaled_advantages, ratio.clamp(smallest, largest) * x.scaled_advantages)
    sums = {
        "clipped_low": count((x.scaled_advantages < 0) & (ratio < smallest)),
        "clipped_high": count((x.scaled_advantages > 0) & (ratio > largest)),
        "ratio": ratio.detach().sum(),
    }
    return gain, sums


def _outside(ratio: torch.Tensor, smallest: float, largest: float) -> dict[str, torch.Tensor]:
    return {
        "clipped_low": count(ratio < smallest),
        "clipped_high": count(ratio > largest),
        "ratio": ratio.sum(),
    }
