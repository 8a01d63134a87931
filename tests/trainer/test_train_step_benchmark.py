"""The step benchmark runs and says what it promises (its numbers are for quiet machines)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")


@pytest.mark.slow
@pytest.mark.nightly(minutes=0.5)
def test_one_line_of_json():
    script = Path(__file__).parents[2] / "benchmarks" / "train_step.py"
    small = ["--micro-batch-tokens", "512", "--steps", "1", "--trained", "0.4"]
    done = subprocess.run([sys.executable, script, *small], capture_output=True, text=True, timeout=4 * HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    # of one pair of steps: the ratio of several is their median, which no two of these numbers tell
    assert report["ratio"] == pytest.approx(report["step_ms"] / report["bare_step_ms"], rel=0.01)
    assert report["host_ms_per_micro_batch"] > 0 and report["family"] == "dense"
    assert report["tokens_per_s"] > 0 and report["trained"] == 0.4
    assert report["machine"]["cores"] == os.cpu_count()
