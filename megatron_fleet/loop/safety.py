"""Judgement of an optimizer step's loss and gradient norm by the preceding norms."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from megatron_fleet.config.schema import SafetyConfig
from megatron_fleet.debug.record import Verdict

WINDOW = 32
"""Number of most recent finite norms whose median is the reference for spikes."""
FEWEST = 8
"""Minimum number of norms to detect a spike: gradient norms of a run's first steps vary widely."""


class StepJudge:
    """Judge optimizer steps by loss and gradient norm, and count the skipped ones.

    Attributes:
        skipped: number of steps of the run that were not finite.
        skipped_in_a_row: number of skipped steps since the last finite one.
    """

    def __init__(self, safety: SafetyConfig) -> None:
        self._factor = safety.spike_factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = self.skipped_in_a_row = 0

    @property
    def median(self) -> float:
        """Median of the last finite norms; 0 without any."""
        return statistics.median(self._norms) if self._norms else 0.0

    def bound(self, loss: float) -> float:
        """Largest acceptable norm of the next step. It is finite, and negative when ``loss`` is not finite.

        A median of 0 (nothing to learn) is no reference.
        """
        if not math.isfinite(loss):
            return -1.0
        if self._factor is None or len(self._norms) < FEWEST or self.median == 0:
            return sys.float_info.max
        return min(self._factor * self.median, sys.float_info.max)

    def judge(self, loss: float, norm: float) -> Verdict:
        """Judge the next step by the recorded norms."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Verdict.NOT_FINITE
        return Verdict.SPIKE if norm > self.bound(loss) else Verdict.FINE

    def record(self, norm: float, skipped: bool) -> None:
        """Record a finished step. Spikes are included, so the median follows when norms stay high."""
        if skipped:
            self.skipped += 1
            self.skipped_in_a_row += 1
        else:
            self._norms.append(norm)
            self.skipped_in_a_row = 0

    def state(self) -> dict[str, Any]:
        """JSON-able state for `load`."""
        return {
            "norms": list(self._norms),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]
