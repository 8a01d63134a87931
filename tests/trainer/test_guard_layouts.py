"""The guarded step over ranks: one bad rank stops all, dumps are whole, and replay in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_ranks

pytest.importorskip("megatron_fleet.trainer.megatron")

import torch

from megatron_fleet import cli
from megatron_fleet.debug.dumps import open_dump
from megatron_fleet.debug.replay import deal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    """The test's folder and what each of two ranks saw; one launch, imports dominate."""
    folder = tmp_path_factory.mktemp("guard")
    run_ranks(Path(__file__).with_name("guard_ranks.py"), 2, folder)
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_every_rank_skips_what_one_of_them_cannot_do(ranks, layout):
    one, two = (rank[layout] for rank in ranks[1])
    assert str(one["reports"]) == str(two["reports"])
    assert [r.skipped for r in one["reports"]] == [False, True, False, False]
    assert [r.spike for r in one["reports"]] == [False, False, False, True]
    assert [r.skipped_total for r in one["reports"]] == [0, 1, 1, 1]
    assert one["state"] == two["state"]
    for weights in (one["weights"], two["weights"]):
        assert all(torch.isfinite(w).all() for w in weights)
    if layout == "dp2":
        assert all(torch.equal(a, b) for a, b in zip(one["weights"], two["weights"], strict=True))


def test_a_dump_has_the_rows_of_every_data_rank(ranks):
    dump = open_dump(ranks[0] / "dp2" / "dumps" / "step-000002.0")
    assert [[len(row) for row in rows] for rows in dump.rows()] == [[2, 2, 2], [2, 0, 2]]
    first, second = dump.record.row_losses
    assert len(first) == len(second) == 3
    assert [x == x for x in first + second] == [True, True, True, True, True, False]
    whole = open_dump(ranks[0] / "pp2" / "dumps" / "step-000002.0")
    assert [[len(row) for row in rows] for rows in whole.rows()] == [[2, 2, 2, 2, 2, 0]]
    assert set(whole.record.gradients) == set(dump.record.gradients)
    assert len(dump.record.gradients) == dump.record.parameters == whole.record.parameters == 35


REPLAYS = [("dp2", "dp2"), ("dp2", "tp2"), ("pp2", "pp2"), ("pp2", "dp2")]


@pytest.mark.parametrize(("layout", "target"), REPLAYS)
def test_both_dumps_replay_in_any_layout(ranks, layout, target):
    for step in (2, 4):
        one, two = (rank[f"{layout}-{step}-{target}"] for rank in ranks[1])
        assert one["status"] == two["status"] == 0, one["found"]["differences"]
        found = one["found"]
        assert found["same_layout"] == (layout == target)
        assert found["tolerance"] == (1e-6 if layout == target else 1e-4)
        assert len(found["rows"]) == 5
        bad = [row for row in found["rows"] if row["loss"] == "nan"]
        assert [[s["fields"] for s in row["sequences"]] for row in bad] == ([[[], ["weights"]]] if step == 2 else [])


def test_parameters_have_their_names_in_the_whole_model(ranks):
    for rank in ranks[1]:
        assert rank["vpp2"].weights == ["decoder.layers.3.mlp.linear_fc2.weight"]
        assert rank["vpp2"].gradients == ["decoder.layers.3.mlp.linear_fc1.weight"]
        assert rank["vpp2"].parameters == 35
        assert rank["ep2"].weights == ["decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight"]
        assert rank["ep2"].gradients == ["decoder.layers.0.mlp.router.weight"]
        assert rank["ep2"].parameters == 3 + 4 * (7 + 2 * 4)


def test_one_process_replays_what_two_did(ranks, capsys):
    for step in (2, 4):
        assert cli.main(["debug", "replay", str(ranks[0] / "dp2" / "dumps" / f"step-00000{step}.0")]) == 0
        assert "reproduced in another layout than the run's (tolerance 0.0001)" in capsys.readouterr().out


def test_rows_are_dealt_so_that_all_ranks_have_as_many():
    recorded = [["a", "b", ""], ["c", "", "d"]]
    assert deal(recorded, 2) == [[(0, 0), (0, 1), None], [(1, 0), None, (1, 2)]]
    assert deal(recorded, 1) == [[(0, 0), (0, 1), (1, 0), (1, 2)]]
    assert deal(recorded, 3) == [[(0, 0), (1, 2)], [(0, 1), None], [(1, 0), None]]
    assert deal([[""]], 2) == [[None], [None]]
