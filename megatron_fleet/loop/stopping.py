"""End of a run before its last step: by a signal, or because its time is over.

Ctrl-C ends a run at once. SIGTERM, SIGUSR1 (which Slurm sends ahead of a job's end, ``--signal=B:USR1@300``) and
``run.time_limit_s`` let it save first: episodes and evaluations are abandoned, to be played again when the run is
resumed; an update is finished. The exit status `REQUEUE` then tells a launcher that the same command goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron_fleet.config.errors import say
from megatron_fleet.platform.waiting import unless

T = TypeVar("T")

REQUEUE = os.EX_TEMPFAIL
"""Exit status of a run that has a checkpoint and is to be started again: 75."""
STOP_DEADLINE_S = 120.0
"""Seconds that ranks, engines and servers have to shut down once nothing is left to save."""


class Stopped(Exception):
    """The run was asked to end. The message says by what."""


class StopRequest:
    """Request to save and end, which training looks at wherever work can be abandoned."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._reason = ""
        self.listeners: list[Callable[[str], None]] = []
        """Called with the reason of the first request."""
        self.heeded = False
        """Whether training looks at it already; before that nothing needs to be saved."""
        self.saved_step: int | None = None
        """Step of the newest checkpoint, from which the run goes on once it has ended; ``None``: there is none."""

    def ask(self, reason: str) -> None:
        """Ask training to end; the first reason stays."""
        if not self._event.is_set():
            self._reason = reason
            self._event.set()
            for listener in self.listeners:
                listener(reason)

    async def interrupt(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work``; raises `Stopped`, and cancels it, when asked before it has ended."""
        return await unless(work, self._asked())

    async def _asked(self) -> Stopped:
        await self._event.wait()
        return Stopped(self._reason)


async def until_stopped(
    work: Callable[[StopRequest], Coroutine[Any, Any, None]], time_limit_s: float | None = None
) -> int:
    """Run ``work`` to its end or until it is to be stopped; a second signal ends the process at once.

    Returns:
        The exit status: 0; `REQUEUE` if the run was to save and there is a checkpoint; else 128 + the number of the
        signal, or 1 for the time limit.
    """
    task, loop, request = asyncio.current_task(), asyncio.get_running_loop(), StopRequest()
    assert task is not None  # a coroutine always runs in a task
    received: list[tuple[str, int, bool]] = []

    def stop(name: str, status: int, gently: bool) -> None:
        received.append((name, status, gently))
        if len(received) > 1 and status > 1:
            say(f"mfleet: ended at once by another {name}.", sys.stderr)
            os._exit(status)  # child processes end with this one
        request.ask(name)
        if not gently or not request.heeded:
            loop.call_later(STOP_DEADLINE_S, os._exit, status)
            task.cancel()

    for number, name in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1")):
        loop.add_signal_handler(number, stop, name, 128 + number, number != signal.SIGINT)
    if time_limit_s is not None:
        loop.call_later(time_limit_s, stop, f"run.time_limit_s={time_limit_s:g}", 1, True)
    try:
        await work(request)
        return 0
    except (asyncio.CancelledError, Stopped):
        if not received:
            raise
        name, status, gently = received[0]
        if (step := request.saved_step) is None:
            say(f"mfleet: stopped by {name}; there is no checkpoint yet, the same command starts anew.", sys.stderr)
            return status
        say(f"mfleet: stopped by {name}; the same command resumes from step {step}, which is saved.", sys.stderr)
        return REQUEUE if gently else status
