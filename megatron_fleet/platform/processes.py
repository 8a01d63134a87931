"""This process and its children: killed ones, stack traces of hanging ones, their priority and their file modes."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

log = logging.getLogger(__name__)

ONLY_OWNER = 0o077
"""File mode creation mask that leaves nothing to the group and to others."""
_SIGNAL = signal.SIGUSR2
_INTERVAL_S = 0.1
_REAP_S = 1.0
"""A child's pipes close before its exit status is available."""


class ChildKilled(Exception):
    """A child process was ended by a signal."""


@contextmanager
def killed_children_raise() -> Iterator[None]:
    """Replace an exception of the body by ChildKilled when SIGKILL ended a `multiprocessing` child of this process,
    e.g. when the kernel ran out of memory. The child must have lived in the body for at least `_INTERVAL_S`.
    """
    import multiprocessing  # takes longer to import than all else here

    seen: set[BaseProcess] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(_INTERVAL_S):
            seen.update(multiprocessing.active_children())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        over.set()
        thread.join()
        for child in seen:
            child.join(_REAP_S)
            if child.exitcode == -signal.SIGKILL:
                raise ChildKilled(f"{child.name} (pid {child.pid}) was killed") from error
        raise
    finally:
        over.set()


def write_stacks_on_signal() -> None:
    """Write the stacks of all threads of this process to stderr whenever it receives ``_SIGNAL``."""
    faulthandler.register(_SIGNAL)


@contextmanager
def stacks_written_after(limit_s: float) -> Iterator[None]:
    """Write the stacks of this process, and of the children that called `write_stacks_on_signal`, when the body takes
    longer than ``limit_s`` seconds.
    """
    timer = threading.Timer(limit_s, _write_all_stacks)  # faulthandler's timer does not hold the GIL and may crash
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write_all_stacks() -> None:
    import psutil  # not in the episode environment

    faulthandler.dump_traceback()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):
            if _catches(child.pid):  # the signal would kill the others
                os.kill(child.pid, _SIGNAL)


def _catches(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) & 1 << _SIGNAL - 1)
    return False


def take_normal_priority() -> None:
    """Run at nice 0 where this process has a lower priority, or warn when that is not permitted.

    Ray starts actors at nice 15 unless RAY_worker_niceness is set; a cluster that existed before the run was started
    with its owner's settings. On busy cores a process at nice 15 hardly runs at all.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        log.warning(
            "this process runs at nice %d and may not change that, so on busy cores it waits for all others; start the "
            "Ray cluster with RAY_worker_niceness=0.",
            nice,
        )


@contextmanager
def private_files(out: Path, shared: bool) -> Iterator[None]:
    """Within, this process and the processes that it starts create folders with mode 0700 and files with 0600.

    Args:
        out: folder of the run's outputs; those above it are made before, with the user's own mask.
        shared: change nothing; the user's own mask decides.
    """
    if shared:
        yield
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    before = os.umask(ONLY_OWNER)
    try:
        yield
    finally:
        os.umask(before)
