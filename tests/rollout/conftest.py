"""Fixtures for the tests of whole rollouts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_fleet.rollout import ray_local

# Test modules import ray, which settles the token of every cluster of this process.
ray_local.authenticate()


@pytest.fixture(scope="session")
def episode_python() -> Path:
    """The episode environment's interpreter, beside this one."""
    python = Path(sys.prefix).parent / "episode" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs the episode environment; run setup.sh")
    return python
