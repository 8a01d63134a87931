"""Taking turns with several ranks: sharded optimizer states, split matrices and stages leave and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from offload_ranks import LAYOUTS
from policy_fixtures import write_config

from megatron_fleet.loop.memory_budget import GIB

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Layout → what each of its two ranks saw."""
    folder = tmp_path_factory.mktemp("offload")
    write_config(folder / "model", num_hidden_layers=2)
    run_ranks(Path(__file__).with_name("offload_ranks.py"), 2, folder)
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
