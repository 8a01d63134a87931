"""Taking turns with several ranks: sharded optimizer states, split matrices and stages leave and come back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron_fleet.policy.megatron")

import torch
from offload_ranks import LAYOUTS
from policy_fixtures import write_config

from megatron_fleet.ledger import GIB

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Layout → what each of its two ranks saw."""
    folder = tmp_path_factory.mktemp("offload")
    write_config(folder / "model", num_hidden_layers=2)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).with_name("offload_ranks.py"), folder]
    with (folder / "log").open("w") as log:
        ranks = [subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=log, stderr=log) for r in range(2)]
        try:
            codes = [rank.wait(600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert codes == [0, 0], (folder / "log").read_text()[-3000:]
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)] for name in LAYOUTS
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_the_same_to_the_bit(results, layout):
    for rank in results[layout]:
        assert rank["same_reports"] and rank["same_parameters"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ledger_tells_the_fuller_rank(results, layout):
    ranks = results[layout]
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    for part in ("parameters", "gradients", "optimizer"):
        most = max(rank["sizes"][part] for rank in ranks)
        assert ranks[0]["metrics"][f"memory/train/{part}"] == most / GIB
        assert ranks[0]["metrics"][f"memory/roll/{part}"] == 0
    assert ranks[0]["metrics"]["memory/publish/parameters"] > 0


def test_data_parallel_ranks_share_the_optimizer(results):
    for rank in results["data2"]:
        assert rank["sizes"]["optimizer"] == pytest.approx(6 * rank["sizes"]["parameters"] / 2, rel=0.05)
