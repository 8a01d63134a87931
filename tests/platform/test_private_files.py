"""A run's outputs are for the user who started it, unless it is shared."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

pytest.importorskip("hydra")

from waiting import HANG_S

from megatron_fleet import cli
from megatron_fleet.evaluation import eval_command as evaluation
from megatron_fleet.loop import main as training
from megatron_fleet.platform.processes import private_files
from megatron_fleet.preflight import checks
from megatron_fleet.storage.local import write_atomically


@pytest.fixture(autouse=True)
def usual_mask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def modes(folder):
    return {p.relative_to(folder).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*")}


@pytest.mark.parametrize("shared", [False, True])
def test_folders_and_files_of_a_run_and_of_its_children(tmp_path, shared):
    out = tmp_path / "runs" / "mine"
    with private_files(out, shared):
        out.mkdir(parents=True)
        write_atomically(out / "config.json", b"{}")
        write = f"open({str(out / 'of_child')!r}, 'w')"
        subprocess.run([sys.executable, "-c", write], check=True, timeout=HANG_S)
    (tmp_path / "after").write_text("")
    folder, file = (0o750, 0o640) if shared else (0o700, 0o600)
    assert modes(tmp_path) == {
        "after": 0o640,
        "runs": 0o750,  # other users may have runs beside this one
        "runs/mine": folder,
        "runs/mine/config.json": file,
        "runs/mine/of_child": file,
    }


def test_logs_follow_the_mask(tmp_path):
    program = (
        "import sys; from pathlib import Path; from megatron_fleet.cluster.launcher import write_output_to; "
        "write_output_to(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "log"], check=True, timeout=HANG_S, umask=0o077)
    assert modes(tmp_path) == {"log": 0o600}


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize("shared", ["false", "true"])
def test_commands_that_write_runs(tmp_path, monkeypatch, command, shared):
    masks = []
    monkeypatch.setattr(checks, "check_training", lambda *_: None)
    for module in (training, evaluation):
        monkeypatch.setattr(module, "main", lambda *_: masks.append(os.umask(0o027)) or 0)
    assert cli.main([command, "experiment=quickstart", "--out", str(tmp_path / "out"), f"run.shared={shared}"]) == 0
    assert masks == [0o027 if shared == "true" else 0o077]


def test_a_saved_traceback_is_private_and_an_old_folder_stays_as_it_is(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("what failed")

    monkeypatch.setattr(checks, "check_training", fail)
    (tmp_path / "old").mkdir()
    for name in ("old", "new"):
        assert cli.main(["train", "experiment=quickstart", "--out", str(tmp_path / name)]) == 1
    assert modes(tmp_path) == {"old": 0o750, "old/error.log": 0o600, "new": 0o700, "new/error.log": 0o600}
