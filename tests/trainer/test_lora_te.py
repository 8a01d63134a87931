"""Adapters and INT4 experts on Transformer Engine's layers: Megatron's code around a stand-in for the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch

ROOT = Path(__file__).parents[2]
VARIANTS = [("qwen3", "te"), ("deepseek_v3", "te"), ("deepseek_v3", "te_grouped")]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[Any, Any]:
    out = tmp_path_factory.mktemp("lora_te") / "built.pt"
    path = [
        ROOT / "tests" / "weights" / "te_stub",
        ROOT,
        ROOT / "tests",
        Path(__file__).parent,
        os.environ.get("PYTHONPATH", ""),
    ]
    env = {"PYTHONPATH": os.pathsep.join(map(str, path)), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("lora_te.py")), str(out)]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=4 * HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "variant"), VARIANTS)
def test_adapters_have_the_names_and_values_of_megatrons_own_layers(built, model, variant):
    own, other = built[model, "local"]["described"], built[model, variant]["described"]
    assert own.keys() == other.keys() and len(own) > 20
    for place, (shape, values) in own.items():
        assert other[place][0] == shape and torch.equal(other[place][1], values)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "variant"), [*VARIANTS, ("qwen3", "local"), ("deepseek_v3", "local")])
def test_an_adapted_layer_is_the_layer_with_merged_weights(built, model, variant):
    assert built[model, variant]["difference"] < 2e-2  # bfloat16


@pytest.mark.slow
def test_a_grouped_layer_computes_and_learns_with_int4_values(built):
    result = built["quantised"]
    assert len(result["got"]) == len(result["wanted"]) == 6
    assert all(torch.equal(a, b) for a, b in zip(result["got"], result["wanted"], strict=True))
