"""Runs to report on."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_maker import RunMaker, groups


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    return RunMaker(tmp_path / "run")


@pytest.fixture
def simple_run(make_run: RunMaker) -> Path:
    """Two environments, an evaluation before and after four steps; ``shop`` gains, ``bank`` stays unsolved."""
    before = groups({f"s{i}": [0.0, 0.0] for i in range(6)}) + groups({f"b{i}": [0.0, None] for i in range(6)}, "bank")
    after = groups({f"s{i}": [1.0, 1.0] for i in range(6)}) + groups({f"b{i}": [0.0, 0.0] for i in range(6)}, "bank")
    make_run.evaluate(0, before, before[:3])
    for step in range(1, 5):
        make_run.train(step, groups({"t1": [0.0, 1.0], "t2": [1.0, 1.0]}) + groups({"u1": [0.0, 0.0]}, "bank"))
    make_run.evaluate(4, after, after[:3])
    return make_run.folder
