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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tinker.types import LossFnType

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.explicit_losses import Loss, TrainedTokens, explicit_loss
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.names import is_path
from megatron_fleet.config.schema import AlgorithmConfig

CROSS_ENTROPY: LossFnType = "cross_entropy"
SERVICE_LOSSES: dict[str, LossFnType] = {
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

    name: LossFnType
    settings: dict[str, float]


def one_pass(algo: AlgorithmConfig, data: Sequence[Datum], service: bool) -> OnePass | None:
    """Return the request that computes the loss of ``data`` in one pass; ``None``: it takes two.

    Args:
        service: by the service's formulas, see ``hosted.losses``.
    """
    if algo.kl.coef > 0 or algo.correction.kind != "off":
        return None  # both need the log-probs of π first
    if algo.loss == "reinforce":
        return OnePass(CROSS_ENTROPY, {})
    if service and algo.loss in SERVICE_LOSSES:
        return OnePass(SERVICE_LOSSES[algo.loss], _settings(algo))
    several_updates = any("proximal" in datum.arrays for datum in data)
    if algo.loss == "importance_weighted" or is_path(algo.loss) or several_updates:
        return None
    return OnePass(CROSS_ENTROPY, {})


def _settings(algo: AlgorithmConfig) -> dict[str, float]:
    if algo.loss == "importance_weighted":
        return {}
    low, high = algo.ratio_bounds
    # Bounds of the ratio, not distances from 1: 0.2 and 0.28 would be accepted, and give good tokens no gradient.
    return {"clip_low_threshold": low, "clip_high_threshold": high}


def trained_weights(data: Sequence[Datum]) -> np.ndarray:
    """Advantage × normaliser of all trained tokens, float32 ``[A]``: the weights of a loss whose ratio is 1."""
    return np.concatenate([np.zeros(0, np.float32), *(d.scaled_advantages[d.loss_mask] for d in data)])


def loss_of(algo: AlgorithmConfig, tokens: TrainedTokens) -> Loss:
    """Compute a loss and its gradient here, from the log-probs of the service.

    Raises:
        UserError: ``algorithm.loss`` is the user's own and torch, which differentiates it, is not installed.
    """
    return differentiated(algo, tokens) if is_path(algo.loss) else explicit_loss(algo, tokens)


def differentiated(algo: AlgorithmConfig, tokens: TrainedTokens) -> Loss:
    """`loss_of` by torch, in float32 as trainer ranks do; entropies are 0, since the service returns none."""
    try:
        import torch
    except ModuleNotFoundError:
        raise UserError(
            f"algorithm.loss={algo.loss}: a loss of your own is differentiated by torch, which this environment lacks; "
            f"install its CPU build there, or use a built-in loss."
        ) from None
    from megatron_fleet.algorithms.loss_inputs import LossInputs
    from megatron_fleet.algorithms.losses import make_loss

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)

    logprobs = tensor(tokens.logprobs).requires_grad_()
    value, sums = make_loss(algo)(
        LossInputs(
            logprobs=logprobs,
            entropy=torch.zeros_like(logprobs, requires_grad=True),
            loss_scale=tensor(tokens.loss_scale),
            scaled_advantages=tensor(tokens.scaled_advantages),
            behaviour=tensor(tokens.behaviour),
            sequence=torch.tensor(tokens.sequence, dtype=torch.int64),
            sequences=int(tokens.sequence.max(initial=-1)) + 1,
            arrays={name: tensor(values) for name, values in tokens.arrays.items()},
        )
    )
    value.backward()
    gradient = np.zeros(len(tokens.logprobs)) if logprobs.grad is None else logprobs.grad.double().numpy()
    return Loss(value.item(), gradient, {name: float(total) for name, total in sums.items() if name != "entropy"})
