"""The plan is near to what this project measured on a GPU (`benchmarks/results/gpu`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("hydra")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import measured_points

POINTS = list(measured_points.points())
FILLED = 8192
"""Tokens of a micro-batch from which on the device, not the host, sets the speed."""


def test_seconds_of_a_micro_batch():
    filled = [p for p in POINTS if p.tokens >= FILLED * (2 if p.variant.startswith("fp8") else 1)]
    assert len(filled) >= 12
    assert {p: p.planned / p.measured - 1 for p in filled if abs(p.planned / p.measured - 1) > 0.1} == {}


def test_memory_of_a_micro_batch_is_not_planned_too_small():
    errors = [p.planned_gib / p.measured_gib - 1 for p in POINTS]
    assert len(errors) >= 16 and all(0 < error < 0.3 for error in errors)


def test_seconds_of_a_decoding_step():
    errors = [p.planned / p.measured - 1 for p in measured_points.decoding() if p.graphs]
    assert len(errors) >= 3 and all(abs(error) < 0.1 for error in errors)
