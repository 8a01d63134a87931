"""Recording of the loss of each micro-batch and sequence, to find the non-finite ones."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from megatron_fleet.algorithms.loss_inputs import LossFn, LossInputs, LossResult
from megatron_fleet.trainer.base import MicroBatches


class RecordedLosses:
    """Loss function that records its values. It is called once for each micro-batch, in order, on the last pipeline
    stage; elsewhere it records nothing.
    """

    def __init__(self, loss: LossFn, micro_batches: MicroBatches, per_sequence: bool) -> None:
        """Wrap ``loss``.

        Args:
            micro_batches: of this rank. Calls beyond them are for empty ones that the layout needs.
            per_sequence: evaluate each sequence alone too; costs a second evaluation of the loss and a device
                synchronisation.
        """
        self._loss, self._micro_batches = loss, micro_batches
        self._totals: list[torch.Tensor] = []
        self._sequences: list[list[float]] | None = [] if per_sequence else None

    def __call__(self, x: LossInputs) -> LossResult:
        number = len(self._totals)
        if self._sequences is not None and number < len(self._micro_batches):
            counts = [int(np.count_nonzero(datum.loss_mask)) for datum in self._micro_batches[number]]
            ends = np.cumsum(counts)
            with torch.no_grad():
                parts = [self._loss(_cut(x, end - n, end))[0] for n, end in zip(counts, ends, strict=True)]
            self._sequences.append([float(part) for part in parts])
        result = self._loss(x)
        # Left on the device: most steps never ask for the values.
        self._totals.append(result[0].detach())
        return result

    def micro_batches(self) -> list[float]:
        """Loss of each micro-batch. Synchronises with the device."""
        return torch.stack(self._totals).tolist()[: len(self._micro_batches)] if self._totals else []

    def sequences(self) -> list[list[float]] | None:
        """Loss of each sequence, by micro-batch; ``None`` when not requested."""
        return self._sequences


def _cut(x: LossInputs, start: int, end: int) -> LossInputs:
    """Slice the inputs to positions ``[start, end)``, all of one sequence."""
    values = {f.name: getattr(x, f.name) for f in fields(x)}
    cut: dict[str, Any] = {name: v[start:end] for name, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(x, **cut)
