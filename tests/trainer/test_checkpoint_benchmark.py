"""A checkpoint takes no memory and no traffic of the size of the model, and Megatron reads it as its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")


@pytest.mark.slow
@pytest.mark.nightly(minutes=0.5)
def test_a_rank_saves_and_loads_its_own_share_in_little_memory():
    script = Path(__file__).parents[2] / "benchmarks" / "checkpoint.py"
    model = ["--ranks", "2", "--layers", "1", "--hidden", "64", "--vocab", "64000", "--transfer-mb", "0"]
    done = subprocess.run([sys.executable, script, *model], capture_output=True, text=True, timeout=4 * HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["interchangeable"]
    assert report["beyond_own_mb"] < 64
    for verb in ("save", "load"):
        ours, gathered = report["ours"][verb], report["gathered"][verb]
        assert ours["collective_mb"] == 0
        assert ours["host_mb"] + ours["device_mb"] < 64  # two blocks of 8 M values at most, whatever the model
        assert gathered["host_mb"] > 1.5 * report["share_mb"]  # the measurement sees what it is to see
