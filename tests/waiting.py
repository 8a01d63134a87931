"""Waiting for what must come, on a machine of any speed, and time that passes only where a test sleeps."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

HANG_S = 300.0
"""Something that takes seconds on a quiet machine and is not there after this long hangs. Every deadline of a test that
must not pass is this one; no test asserts that something takes less."""


def wait_until(true: Callable[[], object], meanwhile: Callable[[], object] = lambda: True) -> None:
    """Return when ``true()`` is; fail when ``meanwhile()`` no longer is before that, or after ``HANG_S``."""
    end = time.monotonic() + HANG_S
    while not true():
        assert meanwhile() and time.monotonic() < end
        time.sleep(0.02)


async def until(true: Callable[[], object]) -> None:
    """Let everything else go on until ``true()`` is; fail after ``HANG_S``."""
    async with asyncio.timeout(HANG_S):
        while not true():
            await asyncio.sleep(0.005)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while there is something to do, and then leaps to the next sleeper's end.

    Deadlines and pauses so have the lengths that a test gives them, however busy the machine is, and take no time. What
    waits for a thread, a process or a socket is not awaited: the clock leaps past it.
    """

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:
            waking = [handle.when() for handle in self._scheduled if not handle.cancelled()]
            self.now = max(self.now, min(waking, default=self.now))
        super()._run_once()


def in_simulated_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A coroutine test that runs on a `SimulatedLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def _now() -> float:
    return asyncio.get_running_loop().time()


LOOP_TIME = SimpleNamespace(monotonic=_now, perf_counter=_now, time=_now)
"""In place of the module ``time`` in a module that measures what goes on in simulated time."""
