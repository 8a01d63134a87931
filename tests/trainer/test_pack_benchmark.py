"""The packing benchmark: its bounds are bounds, and it prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
from packing import fleet_lengths, least_maximum, longest_first, optimum  # noqa: E402


def test_bound_and_search_against_every_partition():
    rng = np.random.default_rng(0)
    tight = 0
    for _ in range(20):
        costs, dp = rng.lognormal(0, 1, 7).tolist(), int(rng.integers(2, 4))
        best = min(
            max(sum(c for c, g in zip(costs, chosen, strict=True) if g == rank) for rank in range(dp))
            for chosen in product(range(dp), repeat=len(costs))
        )
        assert optimum(costs, dp, sum(costs), nodes=10_000) == pytest.approx(best)
        assert least_maximum(costs, dp) <= best * (1 + 1e-12)
        tight += least_maximum(costs, dp) > best * 0.999
    assert tight >= 3
    # Four equal items on three ranks: two meet.
    assert least_maximum([1.0] * 4, 3) == 2


def test_an_unfinished_search_says_so():
    costs = np.random.default_rng(0).lognormal(0, 1, 30).tolist()
    assert optimum(costs, 5, sum(costs), nodes=20) is None


def test_lengths_are_fleet_like_and_the_greedy_plan_is_whole():
    lengths = fleet_lengths(300, 1)
    assert min(lengths) >= 2000 and max(lengths) <= 57_000 and 8_000 < np.median(lengths) < 14_000
    plan = longest_first(lengths, 4, 65_536)
    assert sorted(i for micro_batches in plan for micro_batch in micro_batches for i in micro_batch) == list(range(300))
    assert all(
        sum(lengths[i] for i in micro_batch) <= 65_536 for micro_batches in plan for micro_batch in micro_batches
    )


@pytest.mark.slow
def test_one_line_of_json():
    command = [sys.executable, BENCHMARKS / "packing.py", "--seeds", "1", "--timed", "64", "--nodes", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert len(report["grid"]) == 36 and report["plans"] == 36
    assert report["fill"] >= 0.97
    assert report["imbalance_where_possible"] <= 0.03
    assert report["imbalance_over_bound"] <= report["imbalance"]
    assert report["longest_first"]["costliest_rank_over_ours"] > 1
    assert report["plan_ms"] > 0
