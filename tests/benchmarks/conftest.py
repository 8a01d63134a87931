"""The GPU battery, importable as ``benchmarks/gpu/run.py`` imports it, also in the processes that it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    for folder in (HERE, BENCHMARKS, BENCHMARKS / "gpu"):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("BATTERY_NO_TRANSFORMER_ENGINE", "there is no GPU")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (BENCHMARKS / "gpu", BENCHMARKS, HERE))))
