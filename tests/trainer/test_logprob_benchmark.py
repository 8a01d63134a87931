"""The log-prob benchmark runs and adds up (its numbers are for quiet machines)."""

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
def test_one_line_of_json():
    script = Path(__file__).parents[2] / "benchmarks" / "logprob_memory.py"
    sizes = ["--tokens", "512", "1024", "--vocab", "20000", "--chunk", "64", "--hidden", "32", "--repeats", "1"]
    done = subprocess.run([sys.executable, script, *sizes], capture_output=True, text=True, timeout=4 * HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    for way in ("ours", "plain"):
        assert report["extra_mb"][way].keys() == {"512", "1024"}
        most = max(report["extra_mb"][way].values()) * 2**20 / 1e9
        assert report["at_65536_gb"][way] >= most - 0.01
    assert report["ratio_time"] == pytest.approx(report["seconds"]["ours"] / report["seconds"]["plain"], rel=0.02)
