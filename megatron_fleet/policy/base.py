"""The Policy protocol (the Tinker verbs) and its reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import LossFn

Rows = Sequence[Sequence[Datum]]
"""The micro-batches of one data-parallel rank: the sequences of a row are packed behind each other, at most
``policy.row_tokens`` tokens. Every rank passes the same number of rows; a rank with less data passes empty ones."""


@dataclass(slots=True)
class LossReport:
    """Sums over the global batch, equal on every rank.

    Attributes:
        metrics: metric sums of the loss function, by its names.
        tokens: tokens of sequences, trained or not.
        padded_tokens: what else the rows held.
    """

    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    padded_tokens: int = 0


@dataclass(slots=True)
class OptimReport:
    """One optimizer step, equal on every rank.

    Attributes:
        grad_norm: before clipping.
        skipped: the gradient was not finite, or `Inspect` said no; nothing was changed.
        spike: the norm is far above those of earlier steps; a guarded step tells.
        skipped_total: steps of the run skipped until here, this one included; a guarded step counts.
        gradient: by name, what policy.gradient_metrics found; empty when this step was not measured.
    """

    grad_norm: float
    lr: float
    skipped: bool
    spike: bool = False
    skipped_total: int = 0
    gradient: dict[str, float] = field(default_factory=dict)


Inspect = Callable[[float], bool]
"""Called on every rank with the gradient norm, after the gradients were summed over ranks and before anything is
updated; says whether to go on, the same on every rank. With a norm that is not finite the update is skipped anyway."""


class Policy(Protocol):
    """SPMD: every rank calls every method, in the same order, with its own data-parallel share."""

    def forward(
        self, rows: Rows, which: Literal["current", "reference"] = "current", temperature: float | None = None
    ) -> list[list[np.ndarray]]:
        """Log-probs (float32 ``[T]``, 0 where ``mask`` is 0) in the shape of ``rows``, on every rank. No gradient.

        ``temperature``: ``None`` = that of the sampling.
        """
        ...

    def forward_backward(self, rows: Rows, loss: LossFn) -> LossReport:
        """Accumulate gradients of the SUM of ``loss`` over the global batch."""
        ...

    def optim_step(self, lr: float, inspect: Inspect | None = None) -> OptimReport:
        """Clip, step, zero the gradients. A non-finite gradient skips the step and leaves the state as it was."""
        ...

    def save_state(self, path: Path) -> None: ...

    def load_state(self, path: Path) -> None: ...

    def export_hf(self, path: Path) -> None: ...
