"""The table of models that train on one GPU is what the plan computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import one_gpu_page

from megatron_fleet.planning.hardware import GPUS


@pytest.mark.slow
def test_the_page_is_up_to_date():
    text = one_gpu_page.PAGE.read_text("utf-8")
    assert one_gpu_page.page(text) == text, "run: python tools/one_gpu_page.py"


@pytest.mark.slow
def test_what_fits_a_gpu_fits_a_larger_one():
    ways = ["–", *reversed(one_gpu_page.WAYS)]
    by_memory = sorted((GPUS[name] for name in one_gpu_page.COLUMNS.values()), key=lambda gpu: gpu.memory)
    for model in one_gpu_page.MODELS:
        ranks = [ways.index(one_gpu_page.way(model, gpu).partition(",")[0]) for gpu in by_memory]
        assert ranks[-1] > 0 and ranks == sorted(ranks), model
