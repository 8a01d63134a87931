"""Time budget of a collection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def budget(seconds: float | None, stop: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
    """Await ``stop`` with the reason if the block takes longer than ``seconds``; ``None``: no limit."""
    if seconds is None:
        yield
        return

    async def later() -> None:
        await asyncio.sleep(seconds)
        await stop(f"the budget of {seconds:g} s was over")

    stopping = asyncio.create_task(later())
    try:
        yield
    finally:
        stopping.cancel()
