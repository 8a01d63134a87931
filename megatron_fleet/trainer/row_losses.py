"""The loss of each row, and of each of its sequences: which one is not finite?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from megatron_fleet.algorithms.loss_inputs import LossFn, LossInputs, LossResult
from megatron_fleet.trainer.base import Rows


class RowLosses:
    """A loss function that remembers what it gave for each row. It is called once for each row, in order, on the last
    pipeline stage; elsewhere it remembers nothing."""

    def __init__(self, loss: LossFn) -> None:
        self._loss = loss
        self._totals: list[torch.Tensor] = []

    def __call__(self, x: LossInputs) -> LossResult:
        result = self._loss(x)
        # Left on the device: most steps never ask for the values.
        self._totals.append(result[0].detach())
        return result

    def values(self) -> list[float]:
        """The sums so far, rows in order. Waits for the device."""
        return torch.stack(self._totals).tolist() if self._totals else []


class SequenceLosses(RowLosses):
    """`RowLosses` that also evaluates each sequence alone; for looking into a batch, not for training."""

    def __init__(self, loss: LossFn, rows: Rows, advance: Callable[[], None]) -> None:
        """``advance`` is called after each row."""
        super().__init__(loss)
        self._rows, self._advance = rows, advance
        self.sequences: list[list[float]] = []

    def __call__(self, x: LossInputs) -> LossResult:
        number = len(self._totals)
        if number < len(self._rows):  # what follows are empty rows that the layout needs
            counts = [int(np.count_nonzero(datum.mask)) for datum in self._rows[number]]
            ends = np.cumsum(counts)
            with torch.no_grad():
                parts = [self._loss(_cut(x, end - n, end))[0] for n, end in zip(counts, ends, strict=True)]
            self.sequences.append([float(part) for part in parts])
            self._advance()
        return super().__call__(x)


def _cut(x: LossInputs, start: int, end: int) -> LossInputs:
    """The inputs at positions ``[start, end)``, all of one sequence."""
    values = {f.name: getattr(x, f.name) for f in fields(x)}
    cut: dict[str, Any] = {name: v[start:end] for name, v in values.items() if isinstance(v, torch.Tensor)}
    return replace(x, **cut)
