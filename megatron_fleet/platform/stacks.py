"""Stack traces of hanging processes, written to stderr, because a deadline alone does not show where they hang."""

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
    """Write the stacks of all threads of this process to stderr whenever it receives ``SIGNAL``."""
    faulthandler.register(SIGNAL)


@contextlib.contextmanager
def written_after(limit_s: float) -> Iterator[None]:
    """Write the stacks of this process, and of the children that called `write_on_signal`, when the body takes longer
    than ``limit_s`` seconds.
    """
    timer = threading.Timer(limit_s, _write_all)  # faulthandler's timer does not hold the GIL and may crash
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
            if _catches(child.pid):  # the signal would kill the others
                os.kill(child.pid, SIGNAL)


def _catches(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & 1 << SIGNAL - 1)
    return False
