"""Detection of killed child processes, for code that reports their end as an error of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

INTERVAL_S = 0.1
REAP_S = 1.0
"""A child's pipes close before its exit status is available."""


class ChildKilled(Exception):
    """A child process was ended by a signal."""


@contextlib.contextmanager
def killed_children_told() -> Iterator[None]:
    """Replace an exception of the body by ChildKilled when SIGKILL ended a `multiprocessing` child of this process,
    e.g. when the kernel ran out of memory. The child must have lived in the body for at least `INTERVAL_S`.
    """
    seen: set[BaseProcess] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(INTERVAL_S):
            seen.update(multiprocessing.active_children())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        over.set()
        thread.join()
        for child in seen:
            child.join(REAP_S)
            if child.exitcode == -signal.SIGKILL:
                raise ChildKilled(f"{child.name} (pid {child.pid}) was killed") from error
        raise
    finally:
        over.set()
