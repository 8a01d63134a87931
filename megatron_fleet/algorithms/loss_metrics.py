"""Metrics from a loss's sums, the log-probs that a loss needs, and bounds; free of torch, for the controller."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_fleet.config.schema import AlgorithmConfig

NORMALISED = ("policy_loss", "kl_loss", "entropy_loss")
"""Metric sums that contain the normaliser, so each update's value is already a mean. All others are divided by a count.
"""

OWN = "own/"
"""Prefix of the sums of a user-defined loss."""

MAX_LOG_RATIO = 20.0
"""Bound of exponents (±): float32 stays finite, 0 × inf never becomes NaN, and the gradient outside is 0."""
MAX_K3 = 10.0
"""Largest value of the KL estimate k3, see `algorithms.kl`."""

WITHOUT_PROXIMAL = frozenset({"reinforce", "importance_weighted"})
"""Losses without π_old."""


def needs_proximal(algo: AlgorithmConfig) -> bool:
    """True when several updates of one batch need log π_old, which costs a forward pass before the first of them."""
    return algo.loss not in WITHOUT_PROXIMAL


def finalize_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Convert metric sums over a global batch to named metrics (formulas: ``megatron_fleet.telemetry.registry``).

    Losses are already normalised and only renamed; everything else but a count is a mean over trained tokens. Empty
    when no token was trained.
    """
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    means = {
        "entropy": "policy/policy_entropy",
        "nll": "policy/nll",
        "kl": "policy/policy_kl",
        "kl_clamped": "policy/policy_kl_clamped",
        "ratio": "policy/ratio_mean",
        "clipped_low": "policy/ppo_clip_ratio_low",
        "clipped_high": "policy/ppo_clip_ratio_high",
        "clipped_dual": "policy/ppo_clip_ratio_dual",
        "correction_weight": "policy/correction_weight_mean",
        "corrected_tokens": "policy/correction_tokens",
    }
    out = {name: sums[key] / tokens for key, name in means.items() if key in sums}
    out |= {f"policy/{key}": sums[key] / tokens for key in sums if key.startswith(OWN)}
    out |= {f"policy/{key}": sums[key] for key in NORMALISED if key in sums}
    if "clipped_low" in sums:
        out["policy/ppo_clip_ratio"] = (
            sum(sums.get(f"clipped_{side}", 0.0) for side in ("low", "high", "dual")) / tokens
        )
    if "correction_weight" in sums:
        out["policy/correction_sequences"] = sums["corrected_sequences"] / sums["sequences"]
        squares = tokens * sums["correction_weight_squared"]
        out["policy/correction_ess"] = sums["correction_weight"] ** 2 / squares if squares else 0.0
    if "mismatch_unknown" in sums:
        out |= _mismatch(sums, tokens - sums["mismatch_unknown"])
    return out


def _mismatch(sums: Mapping[str, float], known: float) -> dict[str, float]:
    """Return the metrics of engine against trainer over the ``known`` tokens, for which both have a log-prob."""
    out = {"policy/mismatch_unknown_tokens": sums["mismatch_unknown"]}
    if known:
        mean = sums["mismatch_excess"] / known
        variance = (sums["mismatch_excess_squared"] - known * mean**2) / max(known - 1, 1)
        out |= {
            "policy/mismatch_kl": sums["mismatch_k3"] / known,
            "policy/mismatch_kl_k1": sums["mismatch_k1"] / known,
            "policy/rollout_train_prob_diff_mean": 1.0 + mean,
            "policy/rollout_train_prob_diff_std": math.sqrt(max(variance, 0.0)),
        }
    return out
