"""Files that only their owner can read: records of a run hold prompts, answers and the addresses of servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ONLY_OWNER = 0o077
"""File mode creation mask that leaves nothing to the group and to others."""


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
