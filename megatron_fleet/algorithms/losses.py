"""Losses by name: policy term, correction, KL and entropy, as pure functions of log-probs at trained positions."""

from __future__ import annotations

import re

import torch

from megatron_fleet.algorithms.corrections import correction_weights
from megatron_fleet.algorithms.kl import kl_estimate
from megatron_fleet.algorithms.loss_inputs import LossFn, LossInputs, LossResult, bounded_log_ratio, count
from megatron_fleet.algorithms.loss_metrics import MAX_K3, OWN
from megatron_fleet.algorithms.policy_terms import OWN_LOSS, POLICY_TERMS, PolicyTerm, TermResult
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import load
from megatron_fleet.config.schema import AlgorithmConfig


def make_loss(algo: AlgorithmConfig) -> LossFn:
    """loss = −Σ c·J + kl.coef · Σ normaliser · KL estimate − entropy_coef · Σ normaliser · entropy.

    J is the policy term that ``algo.loss`` names, c the weight of ``algo.correction``. Deterministic, stateless, and
    free of device synchronisation. The returned function raises ValueError when ``kl.coef`` > 0 and ``reference`` is
    missing.

    Raises:
        UserError: ``algo.loss`` is neither built in nor loadable.
    """
    objective = POLICY_TERMS.get(algo.loss) or _own_term(algo.loss)

    def loss(x: LossInputs) -> LossResult:
        gain, sums = objective(x, algo)
        if algo.correction.kind != "off":
            weight, touched = correction_weights(x, algo.correction)
            gain = weight * gain
            sums |= touched
        total = -gain.sum()
        sums |= {"policy_loss": total.detach(), **_common_sums(x)}
        if algo.kl.coef > 0:
            if x.reference is None:
                raise ValueError("a KL term needs reference log-probs in every Datum")
            kl = kl_estimate(x.logprobs, x.reference, algo.kl.estimator)
            kl_loss = algo.kl.coef * (x.loss_scale * kl).sum()
            total = total + kl_loss
            sums |= {"kl_loss": kl_loss.detach(), "kl": kl.detach().sum()}
            if algo.kl.estimator == "k3":
                sums["kl_clamped"] = count(kl.detach() >= MAX_K3)
        if algo.entropy_coef > 0:
            entropy_loss = -algo.entropy_coef * (x.loss_scale * x.entropy).sum()
            total = total + entropy_loss
            sums["entropy_loss"] = entropy_loss.detach()
        return total, sums

    return loss


def _own_term(path: str) -> PolicyTerm:
    """Load a user-defined term and check its results."""
    own = load(OWN_LOSS, path)

    def term(x: LossInputs, algo: AlgorithmConfig) -> TermResult:
        try:
            gain, sums = own(x, algo)
            shape, named = tuple(gain.shape), dict(sums)
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"algorithm.loss={path}: {type(error).__name__}: {error}") from error
        if bad := [name for name in named if not re.fullmatch("[A-Za-z0-9_]+", str(name))]:
            raise UserError(f"algorithm.loss={path}: {bad[0]!r} cannot name a metric; use letters, digits and _.")
        if shape != tuple(x.logprobs.shape):
            raise UserError(
                f"algorithm.loss={path}: gave values of shape {shape} for {len(x.logprobs)} tokens; it must return one "
                f"for each."
            )
        return gain, {f"{OWN}{name}": value.detach() for name, value in named.items()}

    return term


def sft_loss(x: LossInputs) -> LossResult:
    """Supervised loss, the cross-entropy −Σ w·log π(token) of given tokens; w = ``x.scaled_advantages`` is the
    normaliser, optionally times a weight of the sequence. No run names it yet: it drives the trainer where no rewards
    are at hand, in `mfleet tune`, the GPU measurements and tools/make_tiny.py.
    """
    total = -(x.scaled_advantages * x.logprobs).sum()
    sums = {"policy_loss": total.detach(), "nll": -x.logprobs.detach().sum()}
    return total, sums | {"tokens": _count(x.logprobs), "entropy": x.entropy.detach().sum()}


def _count(values: torch.Tensor) -> torch.Tensor:
    return values.new_full((), values.numel(), dtype=torch.float32)  # filled on the device: no host-to-device copy


def _common_sums(x: LossInputs) -> dict[str, torch.Tensor]:
    """Token count, entropy, and the distance between the behaviour policy μ (the engine) and π (the trainer)."""
    log_ratio = bounded_log_ratio(x.logprobs.detach(), x.behaviour)
    unknown = torch.isnan(log_ratio)
    log_ratio = log_ratio.masked_fill(unknown, 0.0)
    # Samples are from μ, so Σ(log μ − log π) and Σ(ρ − 1 − log ρ), ρ = π/μ, both estimate KL(μ‖π): k1 and k3.
    excess = torch.expm1(-log_ratio)
    return {
        "tokens": _count(x.logprobs),
        "entropy": x.entropy.detach().sum(),
        "mismatch_unknown": count(unknown),
        "mismatch_k1": -log_ratio.sum(),
        "mismatch_k3": (torch.expm1(log_ratio) - log_ratio).sum(),
        # μ/π − 1 and its square: kept relative to 1 so that a variance of 1e-6 survives float32 sums.
        "mismatch_excess": excess.sum(),
        "mismatch_excess_squared": excess.square().sum(),
    }
