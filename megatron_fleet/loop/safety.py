"""Are this loss and gradient norm to be trusted? A judgement from the norms before, the same on every rank."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from megatron_fleet.config.schema import Safety

WINDOW = 32
"""Finite norms whose median is the yardstick."""
FEWEST = 8
"""From fewer norms no spike is told: the first steps of a run differ by nature."""


class Verdict(StrEnum):
    FINE = "fine"
    SPIKE = "spike"
    """Finite, and far above the median of the norms before it. The step is taken."""
    NOT_FINITE = "not_finite"
    """The step is skipped. A loss can be nan where the gradient is finite: a clamp stops it on the way back."""


class StepJudge:
    """Judges optimizer steps by loss and gradient norm, and counts the skipped ones.

    Attributes:
        skipped: steps of the run that were not finite.
        skipped_in_a_row: those since the last finite one.
    """

    def __init__(self, safety: Safety) -> None:
        self._factor = safety.spike_factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = self.skipped_in_a_row = 0

    @property
    def median(self) -> float:
        """Of the last finite norms; 0 without any."""
        return statistics.median(self._norms) if self._norms else 0.0

    def judge(self, loss: float, norm: float) -> Verdict:
        """What the next step is, seen from those recorded. Norms of 0 (nothing to learn) make no yardstick."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Verdict.NOT_FINITE
        if self._factor is None or len(self._norms) < FEWEST or self.median == 0:
            return Verdict.FINE
        return Verdict.SPIKE if norm > self._factor * self.median else Verdict.FINE

    def record(self, norm: float, skipped: bool) -> None:
        """A step is over. Spikes count too: when norms stay high, the median follows."""
        if skipped:
            self.skipped += 1
            self.skipped_in_a_row += 1
        else:
            self._norms.append(norm)
            self.skipped_in_a_row = 0

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` goes on from it."""
        return {
            "norms": list(self._norms),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]
