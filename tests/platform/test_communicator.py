"""Each exchange between ranks gives what it says, on every rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_processes import run_ranks

torch = pytest.importorskip("torch")


@pytest.mark.slow
def test_every_exchange_between_two_ranks(tmp_path):
    run_ranks(Path(__file__).with_name("communicator_ranks.py"), 2, tmp_path)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "gathered": [{"rank": 0}, {"rank": 1}],
            "value": ["of", 1],
            "bytes": ["large" * 1000, ""],
            "sum": [3, 2],
            "max": [1, 0],
            "alone": [0, 1, rank],
            "both": [0, 1],
        }
