"""Record of one suspicious optimizer step, as plain values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from megatron_fleet.trainer.base import MicroBatchLoss


class Verdict(StrEnum):
    """A judgement of an optimizer step."""

    FINE = "fine"
    SPIKE = "spike"
    """Finite, but far above the median of the preceding norms. The step is taken."""
    NOT_FINITE = "not_finite"
    """The step is skipped. A loss can be NaN while the gradient is finite: a clamp stops it in the backward pass."""


@dataclass(frozen=True, slots=True)
class Record:
    """Findings of one optimizer step.

    Attributes:
        step: training step, from 1, as in the metrics.
        part: index of the update in that step, from 0.
        verdict: a `Verdict`.
        device: ``cpu`` or ``cuda``.
        loss: of the whole update.
        grad_norm: before clipping.
        median: of the gradient norms before this one.
        micro_batches, weights, gradients, parameters: see `trainer.base.Examination`.
    """

    step: int
    part: int
    verdict: str
    device: str
    lr: float
    loss: float
    grad_norm: float
    median: float
    micro_batches: list[MicroBatchLoss]
    weights: list[str]
    gradients: list[str]
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; a non-finite number becomes text, since JSON cannot represent it."""
        return json_number(asdict(self))

    @staticmethod
    def from_json(values: dict[str, Any]) -> Record:
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        try:
            numbers = {name: float(values[name]) for name in ("lr", "loss", "grad_norm", "median")}
            losses = [MicroBatchLoss(list(m["sequences"]), float(m["loss"])) for m in values["micro_batches"]]
        except OverflowError as error:  # an integer of hundreds of digits
            raise ValueError(str(error)) from error
        return Record(**{**values, **numbers, "micro_batches": losses})


def json_number(value: Any) -> Any:
    """Return ``value`` with every non-finite float, at any depth, as text: nan, inf or -inf."""
    if isinstance(value, dict):
        return {key: json_number(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_number(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
