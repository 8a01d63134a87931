"""Recorded experts reach the routers of every layout: a step with them is that of one process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron_fleet.policy.megatron")
pytest.importorskip("transformers")

import numpy as np
import routing_models
import torch
from routing_models import MODELS
from routing_ranks import LAYOUTS, train

from megatron_fleet.policy.megatron import parallel

sys.path.append(str(Path(routing_models.__file__).parents[1] / "weights"))
from tiny_models import make

pytestmark = pytest.mark.slow


def launch(folder: Path, world: int) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = Path(__file__).with_name("routing_ranks.py")
    ranks = []
    for rank in range(world):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (folder / f"{world}.{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen([sys.executable, script, folder], env=env, stdout=log, stderr=log))
    try:
        codes = [rank.wait(600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = [(folder / f"{world}.{rank}.log").read_text()[-3000:] for rank in range(world)]
    assert codes == [0] * world, "\n".join(logs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    for model in MODELS:
        make(model, folder / model, dtype=torch.float32)
    for world in sorted({world for world, _, _ in LAYOUTS.values()}):
        launch(folder, world)
    return folder


@pytest.fixture(scope="module")
def single(folder) -> dict[str, dict[str, Any]]:
    out = {}
    for model in MODELS:
        out[model] = train(folder / model, {}, "none")
        parallel.shutdown()
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
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
