"""Redirection of a process's output to a log file."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write_output_to(log: Path) -> None:
    """Append this process's stdout and stderr, and those of children started later, to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
