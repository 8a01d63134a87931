"""Gradients reduced during the backward pass, and parameters gathered during the forward pass, change nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import numpy as np
import torch
from megatron.core import parallel_state
from overlap_ranks import RUNS, write_models
from safetensors.torch import load_file
from turns import in_turn

from megatron_fleet.config.schema import OptimizerConfig, PolicyConfig
from megatron_fleet.trainer import verbs
from megatron_fleet.trainer.megatron.gradient_overlap import overlap_arguments

VARIANTS = in_turn(RUNS, ("dp2", "ep2", "hybrid"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, played):
    """Results of two ranks, and what they exported."""
    folder = tmp_path_factory.mktemp("overlap")
    write_models(folder)
    run_ranks(Path(__file__).with_name("overlap_ranks.py"), 2, folder, *played("run"))
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """(run, whether it overlaps) → what each rank measured."""
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


@pytest.mark.slow
@pytest.mark.parametrize("run", VARIANTS)
class TestOverlap:
    def test_updates_are_the_same(self, results, folder, run):
        # Several buckets give ranks other parts, and so another order to the sum of squares in the gradient's norm;
        # Adam turns that into more where a gradient is small.
        close = {"rtol": 0.02, "atol": 1e-2} if run == "bfloat16" else {"rtol": 1e-3, "atol": 5e-5}
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
            for what in ("parameters", "resumed", "resumed from its own"):
                assert plain[what].keys() == overlapped[what].keys()
                for name, value in plain[what].items():
                    torch.testing.assert_close(overlapped[what][name], value, **close, msg=f"{what} {name}")
            for what in ("logprobs", "reference"):
                for one, other in zip(plain[what][0], overlapped[what][0], strict=True):
                    np.testing.assert_allclose(other, one, **close)
        if run == "adapters":
            check_exports(folder)

    def test_parts_are_reduced_during_the_last_backward_pass(self, results, run):
        for plain, overlapped in zip(results[run, False], results[run, True], strict=True):
            assert not any(plain["started"]) and overlapped["buckets"] > 2
            late = {number for number, parts in enumerate(overlapped["started"]) if not all(parts)}
            # One step has no pass. An empty micro-batch does not reach the parameters before attention.
            assert late == ({1, 3, 5, 8, 9, 11, 13, 15} if overlapped["ends_empty"] else {5})

    def test_layers_wait_for_their_own_parameters(self, results, run):
        for plain, overlapped in zip(results[run, False], results[run, True], strict=True):
            assert not any(plain["gathering"])
            first, *others, last = overlapped["gathering"]
            assert first > 2 and last == 0
            if run in ("dp2", "tied", "cp2", "hybrid"):
                assert any(0 < count < first for count in others)


def check_exports(folder):
    """An export after an update has all of it."""
    tensors = [load_file(folder / f"adapters.{overlap}.exported" / "model.safetensors") for overlap in (False, True)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], value, rtol=2e-4, atol=5e-5, msg=name)


def test_verbs_that_read_parameters_wait_for_all_of_them(monkeypatch):
    calls = []

    def called(name):
        return lambda *_: calls.append(name)

    rank = object.__new__(verbs.RankVerbs)
    rank._policy = SimpleNamespace(gathered=called("gathered"), model_chunks=[])
    rank._sender, rank._losses = SimpleNamespace(send=called("send")), None
    rank._state = SimpleNamespace(offload=called("offload"))
    monkeypatch.setattr(verbs, "find_faults", called("examine"))
    monkeypatch.setattr(verbs, "as_plain", lambda value: value)
    rank.send_weights(1, {}, None)
    rank.offload()
    rank.examine()
    assert calls == ["gathered", "send", "gathered", "offload", "gathered", "examine"]


@pytest.mark.parametrize(
    ("asked", "ranks", "cuda", "updates", "expected"),
    [
        (None, 2, True, 1, (True, False)),
        (None, 2, True, 2, (True, True)),
        (None, 2, False, 2, None),
        (None, 1, True, 2, None),
        (True, 2, False, 2, (True, True)),
        (True, 1, True, 2, None),
        (False, 2, True, 2, None),
    ],
)
def test_overlap_is_for_several_ranks_with_gpus(monkeypatch, asked, ranks, cuda, updates, expected):
    def size(with_context_parallel):
        assert with_context_parallel
        return ranks

    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", size)
    given = {"micro_batch_tokens": 64, "optimizer": OptimizerConfig(lr=1e-3)}
    found = overlap_arguments(PolicyConfig(**given, overlap=asked, updates_per_batch=updates), cuda)
    names = "overlap_grad_reduce", "overlap_param_gather"
    assert found == (dict(zip(names, expected, strict=True)) if expected else {})
