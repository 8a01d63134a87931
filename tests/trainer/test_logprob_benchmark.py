"""The log-prob benchmark runs and adds up (its numbers are for quiet machines)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.trainer.megatron")


@pytest.mark.slow
def test_one_line_of_json():
    script = Path(__file__).parents[2] / "benchmarks" / "logprob_memory.py"
    sizes = ["--tokens", "512", "1024", "--vocab", "20000", "--chunk", "64", "--hidden", "32", "--repeats", "1"]
    done = subprocess.run([sys.executable, script, *sizes], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    logits_mb = 1024 * 20000 * 4 / 2**20
    assert 2 * logits_mb < report["extra_mb"]["plain"]["1024"] < 5 * logits_mb
    assert report["extra_mb"]["ours"]["1024"] < logits_mb
    assert report["ratio_time"] == pytest.approx(report["seconds"]["ours"] / report["seconds"]["plain"], rel=0.02)
    assert report["ratio_memory"] < 0.1
