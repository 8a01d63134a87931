"""Settings and fixtures for the tests of all folders."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Any machine will do, however slow or busy: no example has a time limit. Every run has the same examples, so that a
# test that passed does not fail on another day; `--hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True)
settings.load_profile("repeatable")

MANY_THREADS = 80
"""More new ones since the last collection of garbage are those of Megatron's groups. A trained model has 16 groups of
three threads, one of which wakes a hundred times a second; they belong to cycles of references when it is closed.
Hundreds take a third of a core from all later tests."""


@pytest.fixture(scope="session")
def threads_left() -> list[int]:
    """One item: how many threads the last collection has left."""
    return [0]


@pytest.fixture(autouse=True)
def groups_of_closed_models(threads_left: list[int]) -> Iterator[None]:
    """They are freed soon after the test that made them."""
    yield
    if "torch" in sys.modules and len(os.listdir("/proc/self/task")) > threads_left[0] + MANY_THREADS:
        gc.collect()
        threads_left[0] = len(os.listdir("/proc/self/task"))
