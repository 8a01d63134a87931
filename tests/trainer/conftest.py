"""Fixtures for the tests of the policy."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _process_groups_are_freed() -> Iterator[None]:
    """Models lie in reference cycles with the process groups that they used, and each group keeps sockets and pipes
    open until it is collected: hundreds by the end of the suite."""
    before = _open_files()
    yield
    if _open_files() > before:
        gc.collect()


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
