"""Datum: one training sequence, and all that the policy sees of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Datum:
    """One training sequence of ``T`` tokens; index t of each array is about the *prediction* of token t.

    Attributes:
        token_ids: int32 ``[T]``.
        loss_mask: bool ``[T]``, the trained positions; position 0 is never trained.
        scaled_advantages: float32 ``[T]``: advantage × ``loss_scale``. The loss is a plain SUM over positions, so
            gradients do not depend on micro-batching, packing, data or context parallelism.
        behaviour_logprobs: float32 ``[T]``, log μ; 0 at untrained positions.
        loss_scale: the global normaliser of each trained position: 1/number of trained tokens of the global batch for
            token mean, and so on.
        arrays: further values ``[T]`` by name, of the trained positions: they reach the loss as `LossInputs.arrays`,
            float32, and all sequences of a micro-batch have the same names. Of ours ``proximal``, log π_old (without
            it: the single-forward on-policy case, π_old := stop-grad(π)); ``reference``, log π_ref (without it: no KL
            term); ``staleness``, weight versions between the sampling of the token and the update (without it: all
            were sampled with the version being updated).
        extras: what else belongs to the whole sequence, by name: arrays and plain values, which reach the trainer as
            `PackedMicroBatch.extras`. Of ours ``routing``, uint8 or int16 ``[T, layers, k]``, experts to replay (see
            ``Trajectory.routing``; index t is about token t as an input; without it the router chooses).
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    scaled_advantages: np.ndarray
    behaviour_logprobs: np.ndarray
    loss_scale: float = 1.0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)
