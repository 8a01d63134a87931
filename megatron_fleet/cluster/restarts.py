"""Limit and backoff for restarts of a component that died."""

from __future__ import annotations

import asyncio
import logging
import time

log = logging.getLogger(__name__)

MEMORY_S = 3600.0
"""Restarts longer ago than this are forgotten: frequent deaths have a cause that restarting does not fix."""
BACKOFF_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Most seconds before a restart; the pause doubles each time, from ``BACKOFF_S``."""


class OutOfRestarts(Exception):
    """A component died too often. ``str()`` gives its name, the last reason and where to look."""


class Restarts:
    """Restarts of one component.

    Attributes:
        count: restarts so far, forgotten ones included.
    """

    def __init__(self, name: str, where: str, limit: int) -> None:
        """Args: ``where``: a sentence that says where to look. ``limit``: restarts within ``MEMORY_S``."""
        self._name, self._where, self._limit = name, where, limit
        self._recent: list[float] = []
        self.count = 0

    async def pause(self, reason: str) -> None:
        """Wait before the next restart.

        Raises:
            OutOfRestarts: the limit is reached.
        """
        log.warning("%s is lost: %s", self._name, reason)
        now = time.monotonic()
        self._recent = [then for then in self._recent if now - then < MEMORY_S]
        if len(self._recent) >= self._limit:
            times = "once" if not self._recent else f"{len(self._recent) + 1} times"
            raise OutOfRestarts(f"{self._name} died {times}, last: {reason}. {self._where}")
        await asyncio.sleep(min(BACKOFF_S * 2 ** len(self._recent), LONGEST_PAUSE_S))
        self._recent.append(now)
        self.count += 1

    def done(self) -> None:
        """Log that the component is back."""
        log.warning("%s is back", self._name)
