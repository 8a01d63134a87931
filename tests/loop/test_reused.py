"""What is said of a run that is already in ``run.out``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fleet.checkpoint.checkpoints import RECORDS
from megatron_fleet.checkpoint.manifest import MANIFEST
from megatron_fleet.cli import main
from megatron_fleet.config.load import dump_resolved, load
from megatron_fleet.loop.reused import MOST, describe, finished, held_run
from megatron_fleet.telemetry.status import RunStatus

STATUS = RunStatus("quickstart", "quickstart_1", "finished", "node-0", 1, 1e9, 0.0, 3, 3)


def configured(out: Path, *overrides: str):
    return load(["experiment=quickstart", f"run.out={out}", "run.steps=3", *overrides])


@pytest.fixture
def out(tmp_path):
    """A finished run of three steps."""
    folder = tmp_path / "run"
    make_checkpoint(folder, 2)
    make_checkpoint(folder, 3)
    (folder / "config.json").write_text(dump_resolved(configured(folder, "policy.lora.rank=8")))  # of a later attempt
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    STATUS.write(folder)
    return folder


def make_checkpoint(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step_{step:06d}"
    (path / RECORDS).mkdir(parents=True)
    (path / RECORDS / "config.json").write_text(dump_resolved(configured(folder)))
    (path / MANIFEST).write_text(json.dumps({"format": 1, "step": step, "files": {}}))


def said(out: Path, *overrides: str) -> str | None:
    config = configured(out, *overrides)
    held = held_run(config)
    return None if held is None else describe(held, config)


def test_where_the_run_goes_on_and_what_differs(out):
    assert said(out) == f"mfleet: {out} has a run; this one resumes from step 3."
    changed = said(out, "run.steps=6", "policy.optimizer.lr=3e-4", "policy.lora.rank=4", "run.resume=2")
    assert changed == (
        f"mfleet: {out} has a run; this one resumes from step 2; differs: policy.lora.rank 0 → 4, "
        f"policy.optimizer.lr 0.001 → 0.0003, run.steps 3 → 6."
    )


def test_many_differences_are_cut(out):
    path = out / "checkpoints" / "step_000003" / RECORDS / "config.json"
    path.write_text(json.dumps({"x": {f"key{n}": n for n in range(40)}}))
    assert said(out).count("→") == MOST and " more." in said(out)


def test_an_empty_folder_and_one_without_a_whole_checkpoint(tmp_path, out):
    assert said(tmp_path / "new") is None
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.json").write_text("{")
    assert said(tmp_path) == f"mfleet: {tmp_path} has a run without a checkpoint; this one starts anew."
    for path in (out / "checkpoints").rglob(MANIFEST):
        path.unlink()
    assert said(out).startswith(f"mfleet: {out} has a run without a whole checkpoint; differs: policy.lora.rank 8 → 0")


def test_a_run_that_is_moved_aside_says_nothing(out):
    assert said(out, "run.resume=never") is None


@pytest.mark.parametrize(
    ("overrides", "over"),
    [
        ((), True),
        (("run.steps=4",), False),
        (("run.resume=2",), False),
        (("checkpoint.export.check=true",), False),
        (("checkpoint.store.url=s3://bucket/x", "run.id=a"), False),
    ],
)
def test_a_finished_run(out, overrides, over):
    config = configured(out, *overrides)
    held = held_run(config)
    assert held is not None
    sentence = finished(held, config)
    assert (sentence is not None) is over
    if over:
        assert sentence == (
            f"mfleet: {out} is finished (3 steps); raise run.steps to train on, or choose another --out."
        )


@pytest.mark.parametrize("left", ["status", "stopped", "earlier", "export"])
def test_a_run_with_something_left_is_not_finished(out, left):
    if left == "status":
        (out / "status.json").unlink()
    elif left == "export":
        (out / "hf" / "config.json").unlink()
    else:
        changed = {"state": "stopped"} if left == "stopped" else {"step": 2}
        replace(STATUS, **changed).write(out)
    config = configured(out)
    held = held_run(config)
    assert held is not None and finished(held, config) is None


@pytest.mark.slow
@pytest.mark.parametrize("dry", [True, False])
def test_the_command_says_it_and_starts_nothing(out, capsys, monkeypatch, dry):
    from megatron_fleet.loop import main as loop

    monkeypatch.setattr(loop, "main", lambda config: pytest.fail("a finished run was started"))
    overrides = ["experiment=quickstart", "run.steps=3", "policy.optimizer.lr=2e-4"]
    assert main(["train", "--out", str(out), *overrides, *(["--dry-run"] if dry else [])]) == 0
    printed = capsys.readouterr().out
    assert "resumes from step 3; differs: policy.optimizer.lr 0.001 → 0.0002." in printed
    assert "is finished (3 steps); raise run.steps" in printed.splitlines()[-1]
