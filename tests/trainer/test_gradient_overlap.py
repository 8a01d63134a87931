"""Gradients reduced during the backward pass are those reduced after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch
from megatron.core import parallel_state
from overlap_ranks import RUNS, write_models

from megatron_fleet.config.schema import OptimizerConfig, PolicyConfig
from megatron_fleet.trainer.megatron.gradient_overlap import overlap_arguments


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(run, whether it overlaps) → what each rank measured."""
    folder = tmp_path_factory.mktemp("overlap")
    write_models(folder)
    run_ranks(Path(__file__).with_name("overlap_ranks.py"), 2, folder)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
class TestOverlap:
    def test_updates_are_the_same(self, results, run):
        # Several buckets give ranks other parts, and so another order to the sum of squares in the gradient's norm;
        # Adam turns that into more where a gradient is small.
        close = {"rtol": 0.02, "atol": 1e-2} if run == "bfloat16" else {"rtol": 2e-4, "atol": 5e-5}
        for plain, overlapped in zip(results[run, False], results[run, True], strict=True):
            pairs = list(zip(plain["reports"], overlapped["reports"], strict=True))
            assert [one.loss for one, _ in pairs[:2]] == [other.loss for _, other in pairs[:2]]
            assert pairs[2][1].grad_norm == pytest.approx(
                pairs[2][0].grad_norm, rel=1e-3 if run == "bfloat16" else 1e-6
            )
            for one, other in pairs:
                name = "loss" if hasattr(one, "loss") else "grad_norm"
                near = pytest.approx(getattr(one, name), rel=close["rtol"], abs=close["atol"])
                assert getattr(other, name) == near
            for what in ("parameters", "resumed"):
                assert plain[what].keys() == overlapped[what].keys()
                for name, value in plain[what].items():
                    torch.testing.assert_close(overlapped[what][name], value, **close, msg=f"{what} {name}")

    def test_parts_are_reduced_during_the_last_backward_pass(self, results, run):
        for plain, overlapped in zip(results[run, False], results[run, True], strict=True):
            assert not any(plain["started"]) and overlapped["buckets"] > 2
            late = {number for number, parts in enumerate(overlapped["started"]) if not all(parts)}
            # One step has no pass. An empty micro-batch does not reach the parameters before attention.
            assert late == ({1, 3, 5, 8, 9, 11} if overlapped["ends_empty"] else {5})


@pytest.mark.parametrize(
    ("asked", "ranks", "cuda", "overlaps"),
    [
        (None, 2, True, True),
        (None, 2, False, False),
        (None, 1, True, False),
        (True, 2, False, True),
        (True, 1, True, False),
        (False, 2, True, False),
    ],
)
def test_overlap_is_for_several_ranks_with_gpus(monkeypatch, asked, ranks, cuda, overlaps):
    def size(with_context_parallel):
        assert with_context_parallel
        return ranks

    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", size)
    policy = PolicyConfig(micro_batch_tokens=64, optimizer=OptimizerConfig(lr=1e-3), overlap=asked)
    assert overlap_arguments(policy, cuda) == ({"overlap_grad_reduce": True} if overlaps else {})
