"""Circuit breaker against an environment whose episodes fail. A pure state machine; time is an argument."""

from __future__ import annotations

from collections import deque

MAX_PAUSE = 32
"""Longest pause, in units of the first."""


class Breaker:
    """Circuit breaker over the newest ``window`` episodes of one environment (Nygard 2007, Release It!, §5.2).

    *Closed*: every episode is admitted. When ``window`` episodes are known and at least a share ``threshold`` of them
    failed, it opens. *Open*: none is admitted for ``pause_s``. *Half-open*: one is admitted as a probe. If it fails,
    the breaker opens again, for twice as long; if not, it closes and clears its history.

    An episode other than the probe that ends while the breaker is not closed was admitted earlier and is ignored.
    """

    def __init__(self, window: int, threshold: float, pause_s: float) -> None:
        self._failures: deque[bool] = deque(maxlen=window)
        self._threshold = threshold
        self._pause_s = pause_s
        self._pauses = 1
        self._open_until: float | None = None
        self._probe: int | None = None
        self._admitted = 0

    @property
    def open(self) -> bool:
        """Whether the breaker is open or half-open."""
        return self._open_until is not None

    def admit(self, now: float) -> int | None:
        """Admit one episode; return its ticket for ``ended``, or ``None`` while episodes are refused."""
        if self._open_until is not None:
            if now < self._open_until or self._probe is not None:
                return None
            self._probe = self._admitted
        self._admitted += 1
        return self._admitted - 1

    def ended(self, ticket: int, now: float, failed: bool | None) -> None:
        """Record the end of an admitted episode.

        ``failed`` is ``None`` if it says nothing about the environment, e.g. because the engine died.
        """
        if self._open_until is not None:
            if ticket == self._probe:
                self._probed(now, failed)
        elif failed is not None:
            self._failures.append(failed)
            full = len(self._failures) == self._failures.maxlen
            if full and sum(self._failures) >= self._threshold * len(self._failures):
                self._open(now)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next probe; 0 when it may begin or is running, or the breaker is closed."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def _probed(self, now: float, failed: bool | None) -> None:
        self._probe = None
        if failed:
            self._pauses = min(2 * self._pauses, MAX_PAUSE)
            self._open(now)
        elif failed is not None:
            self._open_until, self._pauses = None, 1

    def _open(self, now: float) -> None:
        self._open_until = now + self._pause_s * self._pauses
        self._failures.clear()
