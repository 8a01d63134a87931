"""Limit and backoff for restarts of a component that died."""

from __future__ import annotations

import asyncio
import logging
import time

from megatron_fleet.platform.alerts import alert

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

    def __init__(self, name: str, where: str, limit: int, patience_s: float = 0.0) -> None:
        """
        Args:
            where: a sentence that says where to look.
            limit: restarts within ``MEMORY_S``.
            patience_s: seconds for which it is restarted beyond the limit.
        """
        self._name, self._where, self._limit, self._patience_s = name, where, limit, patience_s
        self._recent: list[float] = []
        self._beyond_since: float | None = None
        self.count = 0

    async def pause(self, reason: str) -> None:
        """Wait before the next restart.

        Raises:
            OutOfRestarts: the limit is reached, and ``patience_s`` would be over before the restart.
        """
        alert(log, "restart", f"{self._name} is lost: {reason}", self._name)
        now = time.monotonic()
        self._recent = [then for then in self._recent if now - then < MEMORY_S]
        pause = min(BACKOFF_S * 2 ** len(self._recent), LONGEST_PAUSE_S)
        if len(self._recent) < self._limit:
            self._beyond_since = None
        else:
            self._beyond_since = now if self._beyond_since is None else self._beyond_since
            left = self._beyond_since + self._patience_s - now - pause
            if left < 0:
                times = "once" if not self._recent else f"{len(self._recent) + 1} times"
                raise OutOfRestarts(f"{self._name} died {times}, last: {reason}. {self._where}")
            log.warning(
                "%s is restarted in %.0f s; if it keeps failing, it is given up %.0f s later", self._name, pause, left
            )
        await asyncio.sleep(pause)
        self._recent.append(now)
        self.count += 1

    def done(self) -> None:
        """Log that the component is back."""
        log.warning("%s is back", self._name)
