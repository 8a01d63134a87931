"""Policy losses by name: pure functions of log-probabilities at trained positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megatron_fleet.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Algorithm


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

PolicyTerm = Callable[[LossInputs, Algorithm], LossResult]
"""The part of a loss that has a name in ``algorithm.loss``; ``make_loss`` adds the KL term and the common sums."""


def ppo_clip(x: LossInputs, algo: Algorithm) -> LossResult:
    """Clipped surrogate with separate bounds and an optional dual clip; ``x.weights`` = advantage × normaliser ≥ 0.

    PPO: Schulman et al. 2017, arXiv:1707.06347 eq. 7. Separate bounds (clip-higher): DAPO, arXiv:2503.14476 §3.1.
    Dual clip: Ye et al. 2020, arXiv:1912.09729 eq. 5.
    """
    proximal = x.logprobs.detach() if x.proximal is None else x.proximal
    ratio = torch.exp((x.logprobs - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    # J = Σ min(ρ·w, clip(ρ, 1−ε_low, 1+ε_high)·w); the normaliser inside w is positive, so min is that of PPO.
    gain = torch.minimum(ratio * x.weights, clipped * x.weights)
    low = (x.weights < 0) & (ratio < 1 - algo.clip_low)
    high = (x.weights > 0) & (ratio > 1 + algo.clip_high)
    dual = torch.zeros_like(low)
    if algo.dual_clip is not None:
        # w < 0: J = Σ max(min(…), c·w): a token that became much likelier although it is bad cannot dominate.
        dual = (x.weights < 0) & (ratio > algo.dual_clip)
        gain = torch.where(x.weights < 0, torch.maximum(gain, algo.dual_clip * x.weights), gain)
    sums = {
        "clipped_low": low.sum(dtype=torch.float32),
        "clipped_high": high.sum(dtype=torch.float32),
        "clipped_dual": dual.sum(dtype=torch.float32),
        "ratio": ratio.detach().sum(),
    }
    return -gain.sum(), sums


POLICY_TERMS: dict[str, PolicyTerm] = {"ppo_clip": ppo_clip}


def make_loss(algo: Algorithm) -> LossFn:
    """loss = policy term + kl.coef · Σ normaliser · KL estimate. Deterministic and free of state.

    The returned function raises ValueError when ``kl.coef`` > 0 and ``reference`` is missing.

    Raises:
        UserError: ``algo.loss`` is not registered.
    """
    if algo.loss not in POLICY_TERMS:
        raise UserError(f"algorithm.loss: {algo.loss!r} is unknown, use one of {', '.join(sorted(POLICY_TERMS))}")
    policy_term = POLICY_TERMS[algo.loss]

    def loss(x: LossInputs) -> LossResult:
        total, sums = policy_term(x, algo)
        sums |= {"policy_loss": total.detach(), **_common_sums(x)}
        if algo.kl.coef > 0:
            if x.reference is None:
                raise ValueError("a KL term needs reference log-probs in every Datum")
            kl = kl_estimate(x.logprobs, x.reference, algo.kl.estimator)
            kl_loss = algo.kl.coef * (x.mask * kl).sum()
            total = total + kl_loss
            sums |= {"kl_loss": kl_loss.detach(), "kl": kl.detach().sum()}
        return total, sums

    return loss


def sft_loss(x: LossInputs) -> LossResult:
    """Cross-entropy −Σ w·log π(token), for warm starts. ``x.weights`` is the normaliser (times a row's weight)."""
    total = -(x.weights * x.logprobs).sum()
    sums = {"policy_loss": total.detach(), "nll": -x.logprobs.detach().sum()}
    return total, sums | {"tokens": _count(x.logprobs), "entropy": x.entropy.detach().sum()}


def _count(values: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values.numel(), dtype=torch.float32, device=values.device)


def _common_sums(x: LossInputs) -> dict[str, torch.Tensor]:
    """Token count, entropy, and how far the behaviour policy μ (the engine) is from π (the trainer)."""
    log_ratio = (x.logprobs.detach() - x.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Samples are from μ, so Σ(log μ − log π) and Σ(ρ − 1 − log ρ), ρ = π/μ, both estimate KL(μ‖π): k1 and k3.
    excess = torch.expm1(-log_ratio)
    return {
        "tokens": _count(x.logprobs),
        "entropy": x.entropy.detach().sum(),
        "mismatch_k1": -log_ratio.sum(),
        "mismatch_k3": (torch.expm1(log_ratio) - log_ratio).sum(),
        # μ/π − 1 and its square: kept relative to 1 so that a variance of 1e-6 survives float32 sums.
        "mismatch_excess": excess.sum(),
        "mismatch_excess_squared": excess.square().sum(),
    }


def finalize_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metric sums over a global batch to named metrics (formulas: ``megatron_fleet.telemetry.registry``).

    Losses are already normalised and only renamed; all else is a mean over trained tokens. Empty when no token was
    trained.
    """
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    means = {
        "entropy": "policy/policy_entropy",
        "nll": "policy/nll",
        "kl": "policy/policy_kl",
        "ratio": "policy/ratio_mean",
        "clipped_low": "policy/ppo_clip_ratio_low",
        "clipped_high": "policy/ppo_clip_ratio_high",
        "clipped_dual": "policy/ppo_clip_ratio_dual",
        "mismatch_k1": "policy/mismatch_kl_k1",
        "mismatch_k3": "policy/mismatch_kl",
    }
    out = {name: sums[key] / tokens for key, name in means.items() if key in sums}
    out |= {f"policy/{key}": sums[key] for key in ("policy_loss", "kl_loss") if key in sums}
    if "clipped_low" in sums:
        out["policy/ppo_clip_ratio"] = sum(sums[f"clipped_{side}"] for side in ("low", "high", "dual")) / tokens
    if "mismatch_excess" in sums:
        mean = sums["mismatch_excess"] / tokens
        out["policy/rollout_train_prob_diff_mean"] = 1.0 + mean
        variance = sums["mismatch_excess_squared"] / tokens - mean**2
        out["policy/rollout_train_prob_diff_std"] = math.sqrt(max(variance, 0.0))
    return out
