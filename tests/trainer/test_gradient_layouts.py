"""Gradient metrics over ranks are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from gradient_runs import MODELS, RUNS, micro_batches_of, run
from policy_fixtures import write_config
from tiny_models import make

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(model, layout) → what rank 0 and rank 1 measured in two updates; with layout ``single``, one process."""
    folder = tmp_path_factory.mktemp("gradients")
    make("qwen3", folder / "adapters")
    for model, changes in MODELS.items():
        write_config(folder / model, **changes)
    run_ranks(Path(__file__).with_name("gradient_runs.py"), 2, folder)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    found = {key: [rank[key] for rank in ranks] for key in RUNS}
    found |= {(model, "single"): [run(folder, model, "single")] for model in ("dense", "sparse", "adapters")}
    # What the experts of two data-parallel ranks see at a time, as one micro-batch.
    one, two, three, four, _ = micro_batches_of(0, 1)
    found["sparse", "paired"] = [run(folder, "sparse", "single", [one + three, two + four])]
    return found


@pytest.mark.parametrize(("model", "layout"), RUNS)
def test_sums_over_ranks_are_those_of_one_process(results, model, layout):
    (single,) = results[model, "single"]
    for rank in results[model, layout]:
        for update, (_, sums) in enumerate(rank):
            assert set(sums) == set(single[update][1]) and len(sums) == 9
            for matrix, found in sums.items():
                coarse = layout == "ep2" and matrix.is_expert
                expected = results["sparse", "paired"][0][update][1][matrix] if coarse else single[update][1][matrix]
                assert found.count == expected.count == (2 if coarse else 4)
                scale = max(expected.total.abs().max().item(), 1e-12)
                torch.testing.assert_close(found.total, expected.total, rtol=0, atol=2e-3 * scale)
                assert found.energy == pytest.approx(expected.energy, rel=2e-3), matrix


@pytest.mark.parametrize(("model", "layout"), RUNS)
def test_metrics_over_ranks_are_those_of_one_process(results, model, layout):
    (single,) = results[model, "single"]
    for rank in results[model, layout]:
        for (found, _), (expected, _) in zip(rank, single, strict=True):
            assert set(found) == set(expected) == {"snr", "update_diversity", "effective_rank", "megabytes_edited"}
            for name in set(expected) - ({"snr"} if layout == "ep2" else set()):
                assert found[name] == pytest.approx(expected[name], rel=0.01, abs=0.005), name


def test_experts_and_routers_are_among_the_samples(results):
    kinds = {matrix.kind for matrix in results["sparse", "single"][0][0][1]}
    assert {kind.split(".")[-2] for kind in kinds} == {
        "linear_qkv",
        "linear_proj",
        "router",
        "linear_fc1",
        "linear_fc2",
    }


def test_adapters_alone_are_sampled_when_they_alone_are_trained(results):
    first, second = (sums for _, sums in results["adapters", "single"][0])
    assert all(matrix.kind.startswith("adapters.") and min(matrix.shape) == 4 for matrix in first)
    # B is 0 at first, so A has no gradient.
    assert {m.kind[-1] for m, sums in first.items() if sums.energy == 0} == {"a"}
    assert all(sums.energy > 0 for sums in second.values())
