"""Recorded experts reach the routers of every layout: a step with them is that of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")
pytest.importorskip("transformers")

import numpy as np
import torch
from routing_models import MODELS
from routing_ranks import LAYOUTS, train
from tiny_models import make
from turns import in_turn

from megatron_fleet.trainer.megatron import parallel

pytestmark = pytest.mark.slow


CASES = [(model, layout) for model in MODELS for layout in LAYOUTS]
ALWAYS = [(model, layout) for model in MODELS for layout in ("tp2", "ep2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, played) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    for model in played("model"):
        make(model, folder / model, dtype=torch.float32)
    cases = played("model", "layout")
    for world in sorted({LAYOUTS[layout][0] for _, layout in cases}):
        run_ranks(Path(__file__).with_name("routing_ranks.py"), world, folder, json.dumps(cases))
    return folder


@pytest.fixture(scope="module")
def single(folder, played) -> dict[str, dict[str, Any]]:
    out = {}
    for model in played("model"):
        out[model] = train(folder / model, {}, "none")
        parallel.shutdown()
    return out


@pytest.mark.parametrize(("model", "layout"), in_turn(CASES, ALWAYS))
def test_a_step_is_that_of_one_process(folder, single, model, layout):
    expected = single[model]
    assert expected["counts"]["routing_choices"] > 0
    for rank in range(LAYOUTS[layout][0]):
        got = torch.load(folder / f"{model} {layout}.{rank}.pt", weights_only=False)
        assert got["counts"] == expected["counts"]
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert got["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for index, logprobs in got["logprobs"].items():
            np.testing.assert_allclose(logprobs, expected["logprobs"][index], atol=1e-5)
        for name, tensor in got["parameters"].items():
            assert (tensor - expected["parameters"][name]).abs().max() < 2e-5, name
            if name.endswith("e_score_correction_bias"):
                torch.testing.assert_close(tensor, expected["parameters"][name], rtol=0, atol=1e-7)
