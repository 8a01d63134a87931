"""Adaptive concurrency limiter for the starts of an environment. A pure state machine; time is an argument."""

from __future__ import annotations

from typing import Literal

ALPHA, BETA = 3.0, 6.0
"""Estimated starts queued at the server: the limit grows below the first, shrinks above the second."""
CUT = 0.5
"""Factor by which a refused start reduces the limit."""

Result = Literal["started", "refused", "dropped"]
"""``refused``: no capacity, an error or a missed deadline. ``dropped``: cancelled by us, so without information."""


class Limiter:
    """Adapts ``limit`` to the server's capacity.

    * A refused start halves the limit, once per round: starts that began before the cut were sent under the old limit
      and cannot cut again. Otherwise it grows by 1 per round (AIMD: Chiu and Jain 1989, Computer Networks 17(1)).
    * It grows only while fewer than ``ALPHA`` starts queue at the server, and shrinks by 1 per round above ``BETA``.
      With L starts in flight, the fastest taking b and this one t seconds, L (1 − b / t) of them wait
      (TCP Vegas: Brakmo and Peterson 1995, IEEE JSAC 13(8); used for services by Netflix's concurrency-limits).
    * Until the first sign of a queue it doubles per round (TCP slow start).

    A control plane that creates instances one at a time therefore sees a handful of requests, never hundreds.
    """

    def __init__(self, first: int, most: int, quick_s: float) -> None:
        """``quick_s``: starts faster than this are no sign of a queue, regardless of the fastest."""
        self.limit = float(first)
        self.under_way = 0
        self._most = float(most)
        self._quick_s = quick_s
        self._fastest = float("inf")
        self._cut_at = float("-inf")
        self._doubling = True

    def begin(self) -> bool:
        """Return whether one more may start now. If so, it is in flight until ``end``."""
        if self.under_way >= int(self.limit):
            return False
        self.under_way += 1
        return True

    def end(self, began: float, now: float, result: Result) -> None:
        """Record the end of a start. ``began``, ``now``: seconds on the same clock."""
        full = self.under_way >= int(self.limit)
        self.under_way -= 1
        if result == "refused":
            self._refused(began, now)
        elif result == "started":
            self._started(now - began, full)

    def _refused(self, began: float, now: float) -> None:
        self._doubling = False
        if began >= self._cut_at:
            self.limit = max(1.0, self.limit * CUT)
            self._cut_at = now

    def _started(self, seconds: float, full: bool) -> None:
        self._fastest = min(self._fastest, seconds)
        queued = self.limit * (1 - self._fastest / seconds) if seconds > self._quick_s else 0.0
        if queued > ALPHA:
            self._doubling = False
        if queued > BETA:
            self.limit = max(1.0, self.limit - 1 / self.limit)
        elif queued <= ALPHA and full:  # an unused limit says nothing about a higher one
            self.limit = min(self._most, self.limit + (1.0 if self._doubling else 1 / self.limit))
