"""Restoration of normal priority in a process that was started at a low one."""

from __future__ import annotations

import logging
import os

log = logging.getLogger(__name__)


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
