"""Layers that are recomputed compute twice, and the gradients stay the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from policy_fixtures import write_config
from recompute_ranks import LAYOUTS, RECOMPUTE, run


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0 and torch.equal(found[name], gradient), name


@pytest.mark.slow
def test_the_first_layers_are_recomputed(tmp_path):
    folder = write_config(tmp_path)
    expected, once = run(folder, {}, "none")
    assert once == [[1, 1, 1, 1]]
    for recompute, calls in ((3, [2, 2, 2, 1]), ("full", [2, 2, 2, 2])):
        found, counts = run(folder, {}, recompute)
        assert counts == [calls]
        assert_equal(found, expected)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = write_config(tmp_path_factory.mktemp("recompute"), num_hidden_layers=8)
    run_ranks(Path(__file__).with_name("recompute_ranks.py"), 2, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pipeline_recomputes_the_first_layers_of_each_model_chunk(ranks, layout):
    counts = {some: [rank[layout, some][1] for rank in ranks] for some in RECOMPUTE[layout]}
    assert (
        counts
        == {
            "pp2 uneven": {
                "none": [[[1] * 2], [[1] * 6]],
                4: [[[2] * 2], [[2, 2, 2, 2, 1, 1]]],
                "full": [[[2] * 2], [[2] * 6]],
            },
            "vpp2": {"none": [[[1, 1]] * 2] * 2, 1: [[[2, 1]] * 2] * 2, "full": [[[2, 2]] * 2] * 2},
        }[layout]
    )
    for some in RECOMPUTE[layout]:
        assert_equal(ranks[0][layout, some][0], ranks[0][layout, "none"][0])
