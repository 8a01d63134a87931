"""`mfleet runs`: what is said of runs in folders and stores, and what is removed."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest
from run_maker import RunMaker, groups

from megatron_fleet import cli
from megatron_fleet.analysis import runs
from megatron_fleet.analysis.report import build
from megatron_fleet.analysis.run import read_run
from megatron_fleet.analysis.run_files import EVALUATION
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.checkpoint.store import RunStore
from megatron_fleet.config.errors import UserError
from megatron_fleet.evaluation.store import IDENTITY
from megatron_fleet.storage.local import fingerprint
from megatron_fleet.storage.run_folder import RunFolder


def make(folder: Path, run_id: str, steps: int = 6, saved: tuple[int, ...] = (2, 4), lr: float = 1.0) -> Path:
    """A run that ended after step 5."""
    RunFolder(folder, "mine", run_id).close()
    config = {"run": {"id": run_id, "out": str(folder), "steps": steps}, "policy": {"optimizer": {"lr": lr}}}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"step": step, "time": 1e9 + step, "eval/all/pass_at_1": step / 10} for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def write(path: Path):
        (path / "weights").write_bytes(os.urandom(1000))
        return {"weights": fingerprint(path / "weights")}

    checkpoints = Checkpoints(folder / "checkpoints", 99, records=[folder / "config.json"])
    for step in saved:
        asyncio.run(checkpoints.save(step, write, {}))
    return folder


def stored(folder: Path, url: str) -> None:
    store = RunStore(url)
    store.begin_attempt()
    for path in reversed(Checkpoints(folder / "checkpoints", 99).folders()):
        store.upload(Checkpoint.open(path), threading.Event())


def test_runs_are_listed_with_their_state(tmp_path, capsys):
    make(tmp_path / "runs" / "a", "a_1")
    make(tmp_path / "runs" / "b", "b_2", steps=5)
    make(tmp_path / "runs" / "c", "c_3", saved=())
    (tmp_path / "runs" / "other").mkdir()
    with RunFolder(tmp_path / "runs" / "c", "mine"):
        assert cli.main(["runs", "list", str(tmp_path / "runs"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["id"], run["state"], run["step"], run["steps"], run["pass_at_1"]) for run in found] == [
        ("a_1", "stopped", 5, 6, 0.5), ("b_2", "finished", 5, 5, 0.5), ("c_3", "running", 5, 6, 0.5),
    ]  # fmt: skip
    assert [saved["step"] for saved in found[0]["checkpoints"]] == [4, 2] and found[2]["checkpoints"] == []
    assert found[0]["checkpoints"][0]["nbytes"] > 1000
    assert cli.main(["runs", "list", str(tmp_path / "runs")]) == 0
    assert "a_1" in capsys.readouterr().out


def test_the_runs_of_a_store(tmp_path):
    store = tmp_path / "store"
    stored(make(tmp_path / "a", "a_1"), f"{store}/project/model/a_1")
    stored(make(tmp_path / "b", "b_2", saved=(3,)), f"{store}/project/model/b_2")
    found = runs.find_runs(f"{store}/project/model/a_1")
    assert [(run.id, run.state, run.step, run.steps) for run in found] == [("a_1", "stored", 4, 6)]
    assert [run.id for run in runs.find_runs(str(store))] == ["a_1", "b_2"]
    with pytest.raises(UserError, match="2 runs are there; name one of them"):
        runs.find_run(str(store))


def test_what_two_runs_set_differently(tmp_path, capsys):
    one, other = make(tmp_path / "a", "a_1"), make(tmp_path / "b", "b_2", lr=2.0)
    assert cli.main(["runs", "diff", str(one), str(other)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["key", "a", "b"], ["policy.optimizer.lr", "1.0", "2.0"],
    ]  # fmt: skip
    assert cli.main(["runs", "diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "all settings are equal\n"


@pytest.mark.parametrize("where", ["here", "store"])
def test_pruning(tmp_path, where, capsys):
    folder = make(tmp_path / "a", "a_1", saved=(1, 2, 3, 4))
    if where == "store":
        stored(folder, f"{tmp_path}/store/a_1")
        RunStore(f"{tmp_path}/store/a_1").set_later_aside(3)
    else:
        Checkpoints(folder / "checkpoints", 99).set_later_aside(3)
    place = str(folder) if where == "here" else f"{tmp_path}/store/a_1"
    before = runs.find_run(place)
    assert [saved.step for saved in before.checkpoints] == [3, 2, 1] and before.superseded == 1
    assert cli.main(["runs", "prune", place, "--keep", "2", "--dry-run"]) == 0
    assert runs.find_run(place) == before
    assert cli.main(["runs", "prune", place, "--keep", "2"]) == 0
    after = runs.find_run(place)
    assert [saved.step for saved in after.checkpoints] == [3, 2] and after.superseded == 0
    assert cli.main(["runs", "prune", place, "--keep", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to remove"


def test_nothing_is_pruned_of_a_run_in_use_or_beside_a_damaged_checkpoint(tmp_path):
    folder = make(tmp_path / "a", "a_1")
    with RunFolder(folder, "mine"), pytest.raises(UserError, match="another process is using this folder"):
        runs.prune(str(folder), 1, remove=True)
    (folder / "checkpoints" / "step_000004" / "weights").write_bytes(bytes(1000))
    assert runs.prune(str(folder), 1, remove=True) == []  # the only good one stays
    (folder / "checkpoints" / "step_000002" / "weights").write_bytes(bytes(1000))
    with pytest.raises(UserError, match="is damaged"):
        runs.prune(str(folder), 1, remove=True)
    assert len(list((folder / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("command", [["list"], ["show"], ["prune"]])
def test_no_such_folder_is_a_sentence(tmp_path, command, capsys):
    assert cli.main(["runs", *command, str(tmp_path / "none")]) == 2
    assert "no such folder; name the folder of your runs" in capsys.readouterr().err


def test_an_evaluation_is_a_kind_of_its_own(tmp_path, capsys):
    assert EVALUATION == IDENTITY
    make(tmp_path / "a", "a_1")
    folder = tmp_path / "greedy"
    maker = RunMaker(folder)
    maker.log.write(0, groups({"t": [0.0, 1.0]}), "eval")
    for name in ("metrics.jsonl", "split.json"):
        (folder / name).unlink(missing_ok=True)
    (folder / EVALUATION).write_text("{}")
    assert [(run.id, run.kind, run.state, run.steps) for run in runs.find_runs(str(folder))] == [
        ("greedy", "evaluation", "stopped", None)
    ]
    (folder / "metrics.json").write_text(json.dumps({"eval/all/pass_at_1": 0.5}))
    assert cli.main(["runs", "list", str(tmp_path)]) == 0
    rows = {line.split()[0]: line.split()[1:5] for line in capsys.readouterr().out.splitlines()}
    assert rows["a_1"][0] == "training"
    assert rows["greedy"] == ["evaluation", "finished", "–", "0.500"]

    run = read_run(folder)
    document, _ = build(run)
    assert document.title == "Evaluation greedy" and all("tokenizer" in note for note in run.notes)
    assert {"curves", "signal"}.isdisjoint(section.id for section in document.sections)
    assert not any(fact.label == "training steps" for fact in document.sections[0].blocks[0].facts)
