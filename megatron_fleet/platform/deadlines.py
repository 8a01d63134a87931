"""Deadlines whose clock stands still while nothing can be done about the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

_CURRENT: ContextVar[asyncio.Timeout | None] = ContextVar("_CURRENT", default=None)


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout`, whose clock `DeadlineClock` stops and starts from inside.

    Raises:
        TimeoutError: the block takes longer.
    """
    async with asyncio.timeout(seconds) as timeout:
        token = _CURRENT.set(timeout)
        try:
            yield timeout
        finally:
            _CURRENT.reset(token)


class DeadlineClock:
    """Clock of one `deadline`; without one, nothing happens. Both methods are idempotent."""

    def __init__(self, timeout: asyncio.Timeout | None) -> None:
        self._timeout, self._left_s = timeout, 0.0

    @classmethod
    def current(cls) -> DeadlineClock:
        """Return the clock of the innermost `deadline` around the running code."""
        return cls(_CURRENT.get())

    def stop(self) -> None:
        """Stop the clock: the deadline cannot pass."""
        if self._timeout is not None and not self._timeout.expired() and (when := self._timeout.when()) is not None:
            self._left_s = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def go_on(self) -> None:
        """Restart the clock with the time that was left."""
        if self._timeout is not None and not self._timeout.expired() and self._timeout.when() is None:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)
