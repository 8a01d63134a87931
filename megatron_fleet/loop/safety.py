"""Judge loss and gradient norm of an optimizer step from the norms before it."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from megatron_fleet.config.schema import Safety
from megatron_fleet.debug.record import Verdict

WINDOW = 32
"""Finite norms whose median is the yardstick."""
FEWEST = 8
"""From fewer norms no spike is judged: the first steps of a run differ by nature."""


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

    def bound(self, loss: float) -> float:
        """The largest norm of a next step that is fine: finite, and negative when ``loss`` is not finite.

        Norms of 0 (nothing to learn) make no yardstick.
        """
        if not math.isfinite(loss):
            return -1.0
        if self._factor is None or len(self._norms) < FEWEST or self.median == 0:
            return sys.float_info.max
        return min(self._factor * self.median, sys.float_info.max)

    def judge(self, loss: float, norm: float) -> Verdict:
        """Judge the next step by those recorded."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Verdict.NOT_FINITE
        return Verdict.SPIKE if norm > self.bound(loss) else Verdict.FINE

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
