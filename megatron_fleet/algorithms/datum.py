"""Datum: one training sequence, and all that the policy sees of a rollout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class Datum:
    """One training sequence of ``T`` tokens; index t of each field is about the *prediction* of token t.

    Attributes:
        token_ids: int32 ``[T]``.
        loss_scale: float32 ``[T]``: the global normaliser at trained positions (1/number of trained tokens of the
            global batch for token mean, and so on), 0 elsewhere. Position 0 is never trained.
        scaled_advantages: float32 ``[T]``: advantage × ``loss_scale``. The loss is a plain SUM over positions, so
            gradients do not depend on micro-batching, packing, data or context parallelism.
        behaviour_logprobs: float32 ``[T]``, log μ; 0 at untrained positions.
        proximal_logprobs: float32 ``[T]``, log π_old; ``None`` = the single-forward on-policy case, π_old :=
            stop-grad(π).
        reference_logprobs: float32 ``[T]``, log π_ref; ``None`` = no KL term.
        routing: uint8 or int16 ``[T, layers, k]``, experts to replay (see ``Trajectory.routing``); the only field that
            is about token t as an input. ``None`` = the router chooses.
        staleness: int32 ``[T]``, weight versions between the sampling of a trained token and the update; 0 elsewhere.
            ``None`` = all were sampled with the version being updated.
    """

    token_ids: np.ndarray
    loss_scale: np.ndarray
    scaled_advantages: np.ndarray
    behaviour_logprobs: np.ndarray
    proximal_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    routing: np.ndarray | None = None
    staleness: np.ndarray | None = None

    @property
    def loss_mask(self) -> np.ndarray:
        """Mask of the trained positions, bool ``[T]``."""
        return self.loss_scale != 0

    def __len__(self) -> int:
        return len(self.token_ids)
