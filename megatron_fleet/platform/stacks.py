"""The stacks of processes that hang, written to where their errors go: what a deadline alone does not tell."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

SIGNAL = signal.SIGUSR2


def write_on_signal() -> None:
    """Write the stacks of all threads of this process to its standard error whenever it gets ``SIGNAL``."""
    faulthandler.register(SIGNAL)


@contextlib.contextmanager
def written_after(limit_s: float) -> Iterator[None]:
    """Write the stacks of this process, and of those children that called `write_on_signal`, when the body takes longer
    than ``limit_s`` seconds."""
    timer = threading.Timer(limit_s, _write_all)  # faulthandler's own does not hold the GIL, and may crash
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write_all() -> None:
    import psutil  # not in the episode environment

    faulthandler.dump_traceback()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            if _catches(child.pid):  # the others would die of it
                os.kill(child.pid, SIGNAL)


def _catches(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & 1 << SIGNAL - 1)
    return False
