"""The planned step times of runs that others published are near to what they measured, and the page says how near."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

pytest.importorskip("hydra")

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "tools")]
import planning_page
import step_points
from waiting import HANG_S


def test_errors_are_bounded():
    errors = step_points.errors()
    assert len(errors) >= 15
    steps = {name: error for (name, phase), error in errors.items() if phase == "step"}
    assert {name for name, error in steps.items() if abs(error) > 0.26} == {"DeepSeek-V3, 64 nodes"}
    assert sum(map(abs, errors.values())) / len(errors) < 0.15


def test_their_engines_take_turns_with_the_host():
    """Of the releases, 0.6 alone has a vLLM that schedules asynchronously, and not with several GPUs (`predicted`)."""
    assert all(run.engines[1] > 1 for run in step_points.RUNS if run.where == step_points.NEMO6)


def test_runs_of_one_model_are_ranked_as_they_were_measured():
    for model, runs in groupby(step_points.RUNS, key=lambda run: run.model):
        several = list(runs)
        planned = sorted(several, key=lambda run: step_points.predicted(run).total)
        assert planned == sorted(several, key=lambda run: run.measured["step"]), model


def test_cpus_of_other_vendors_simulate_the_same():
    """NumPy has another exponential function where there is AVX-512."""
    program = "from megatron_fleet.planning.workload import _lengths; print(_lengths(6e3, 32768, 1.0, 4096).tolist())"
    without = os.environ | {"NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX"}
    results = [
        subprocess.run([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, timeout=HANG_S, check=True)
        for environ in (dict(os.environ), without)
    ]
    assert results[0].stdout == results[1].stdout and len(results[0].stdout) > 4096


@pytest.mark.slow
def test_the_page_is_current(tmp_path):
    text = planning_page.PAGE.read_text(encoding="utf-8")
    assert planning_page.page(text) == text, "run: python tools/planning_page.py"
    planning_page.draw(tmp_path / "planning.svg")
    assert planning_page.PICTURE.read_text() == (tmp_path / "planning.svg").read_text(), "run: tools/planning_page.py"
