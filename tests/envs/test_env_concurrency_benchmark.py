"""The benchmark of many episodes at once, small: it measures what it promises, and nothing leaks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("torch")  # the parent is of the engine environment
pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "env_concurrency.py"


@pytest.mark.usefixtures("episode_python")
@pytest.mark.nightly(minutes=0.5)
def test_small():
    command = [sys.executable, str(BENCHMARK), "--concurrency", "40", "--rounds", "3"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=4 * HANG_S)
    assert run.returncode == 0, run.stderr[-2000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert (said["concurrency"], said["episodes"]) == (40, 120)
    figures = said["figures"]
    for role in ("server", "worker"):
        left = figures["leaks"][role]
        assert {left[name] for name in ("threads", "fds", "tasks", "sqlite", "children")} == {0}
        assert 0 <= figures["loop_lag"][role]["p50_ms"] <= figures["loop_lag"][role]["p99_ms"]
    assert figures["ours"]["tool_calls_per_s"] > figures["ours"]["sessions_per_s"] > 0
    assert figures["ratio"] > 0
