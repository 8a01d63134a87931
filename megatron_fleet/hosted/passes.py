"""Which request computes a loss at the service.

The service has formulas of its own, all sums over tokens. One of them, ``cross_entropy``, is −Σ w·log π with a weight
for each token, so it computes any loss whose gradient is known beforehand. That is so for all built-in losses but
``importance_weighted`` in the only update of a batch: there π_old is π, the ratio is 1, and the gradient is that of
REINFORCE (see `policy_terms`). Everything else takes two passes: one for the log-probs, then ``cross_entropy`` with the
gradient of our own formula, or of the user's, as weights.

With ``hosted.losses=service`` a loss is sent as the service's formula of the same paper, in one pass. These differ from
ours: their ratio is π over the *sampler's* policy, not over the policy before the first update of the batch, and
``importance_sampling`` masks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_fleet.config.names import is_path
from megatron_fleet.config.schema import AlgorithmConfig

Formula = Literal["cross_entropy", "ppo", "cispo", "importance_sampling"]
CROSS_ENTROPY: Formula = "cross_entropy"
SERVICE_LOSSES: dict[str, Formula] = {
    "reinforce": CROSS_ENTROPY,
    "ppo_clip": "ppo",
    "cispo": "cispo",
    "importance_weighted": "importance_sampling",
}
"""Formulas of the service by our names."""


@dataclass(frozen=True, slots=True)
class OnePass:
    """A loss that one request computes.

    Attributes:
        name: the service's name of it.
        settings: its settings by name.
    """

    name: Formula
    settings: dict[str, float]


def one_pass(algo: AlgorithmConfig, several_updates: bool, service: bool) -> OnePass | None:
    """Return the request that computes the loss of an update in one pass; ``None``: it takes two.

    Args:
        several_updates: the batch has several updates, so that π_old is not π.
        service: by the service's formulas, see ``hosted.losses``.
    """
    if algo.kl.coef > 0 or algo.correction.kind != "off":
        return None  # both need the log-probs of π first
    if algo.loss == "reinforce":
        return OnePass(CROSS_ENTROPY, {})
    if service and algo.loss in SERVICE_LOSSES:
        return OnePass(SERVICE_LOSSES[algo.loss], _settings(algo))
    if algo.loss == "importance_weighted" or is_path(algo.loss) or several_updates:
        return None
    return OnePass(CROSS_ENTROPY, {})


def _settings(algo: AlgorithmConfig) -> dict[str, float]:
    if algo.loss == "importance_weighted":
        return {}
    low, high = algo.ratio_bounds
    # Bounds of the ratio, not distances from 1: 0.2 and 0.28 would be accepted, and give good tokens no gradient.
    return {"clip_low_threshold": low, "clip_high_threshold": high}
