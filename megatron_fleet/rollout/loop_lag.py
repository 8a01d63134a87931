"""Lag of the event loop: the delay that blocking calls cause for all other tasks."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 0.05
KEPT = 1200
"""Number of newest samples kept: one minute."""
WARN_S = 1.0

log = logging.getLogger(__name__)


class LoopLag:
    """Sampler of the running loop's lag, active inside ``watching``."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=KEPT)
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample inside the context, which can be entered several times at once. Needs a running loop."""
        self._watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._task.cancel()
                self._task = None

    def quantile(self, q: float) -> float:
        """Return the ``q`` quantile of the lag in seconds; 0 without samples."""
        ordered = sorted(self._samples)
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            lag = max(0.0, clock() - due)
            self._samples.append(lag)
            if lag > WARN_S:
                log.warning("the event loop was blocked for %.1f s", lag)
