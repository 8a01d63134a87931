"""Jobs on this machine: the supervisor starts again what saved before its end, and nothing that ended for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from megatron_fleet import cli
from megatron_fleet.config.errors import UserError
from megatron_fleet.launch import plan as planning
from megatron_fleet.launch.job import Job, write_files, write_record
from megatron_fleet.launch.local import Local, Torchrun
from megatron_fleet.launch.plan import plan


class Scripted(Local):
    """Runs a shell script in place of `mfleet train`."""

    def __init__(self, script: str) -> None:
        self._script = script

    def program(self) -> list[str]:
        return ["sh", "-c", self._script, "mfleet"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "commit", lambda: None)


def job(*sets: list[str]) -> Job:
    sets = sets or ([],)
    return plan([["experiment=quickstart", *overrides] for overrides in sets], dict(os.environ))


def start(launcher: Local, planned: Job) -> Path:
    launcher.check(planned)
    rendered = launcher.render(planned)
    write_files(planned, rendered)
    write_record(planned.folder, launcher.submit(planned, rendered))
    return planned.folder.parent


def followed(out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    status = cli.main(["launch", "--follow", str(out)])
    return status, [line for line in capsys.readouterr().out.splitlines() if line.startswith("attempt")]


@pytest.mark.slow
def test_a_run_that_saved_is_started_again_and_must_resume(capsys):
    script = 'echo "attempt ${*}"; [ -e once ] && exit 0; touch once; exit 75'
    status, attempts = followed(start(Scripted(script), job()), capsys)
    first, second = [attempt.split() for attempt in attempts]
    assert status == 0 and second == [*first, "run.resume=must"]


@pytest.mark.slow
def test_a_run_that_failed_is_not_started_again(capsys):
    assert followed(start(Scripted("echo attempt; exit 2"), job()), capsys) == (2, ["attempt"])


@pytest.mark.slow
def test_a_run_is_not_started_again_for_ever(capsys):
    out = start(Scripted("echo attempt; exit 75"), job(["launch.max_requeues=2"]))
    assert followed(out, capsys) == (75, ["attempt"] * 3)


@pytest.mark.slow
def test_runs_of_a_sweep_follow_one_another(capsys):
    sets = [[f"run.seed={seed}", "run.out=s"] for seed in (1, 2)]
    status, attempts = followed(start(Scripted('echo "attempt $2"; [ "$2" != run.seed=1 ]'), job(*sets)), capsys)
    assert (status, attempts) == (1, ["attempt run.seed=1", "attempt run.seed=2"])


@pytest.mark.slow
def test_a_cancelled_run_saves_and_is_gone(tmp_path, capsys):
    script = "trap 'echo attempt saved; exit 75' TERM; touch running; while :; do sleep 0.1; done"
    out = start(Scripted(script), job())
    wait_until((tmp_path / "running").exists)
    with pytest.raises(UserError, match="its job still runs"):
        start(Scripted(script), job())
    assert cli.main(["launch", "--cancel", str(out)]) == 0
    assert followed(out, capsys) == (75, ["attempt saved"])
    assert cli.main(["launch", "--cancel", str(out)]) == 2
    assert "its job has ended already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_goes_on_without_the_process_that_started_it(tmp_path):
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_launch_local import Scripted, job, start
print(start(Scripted("while [ ! -e go ]; do sleep 0.1; done; touch gone"), job()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        timeout=HANG_S,
        capture_output=True,
        text=True,
    )
    assert not (tmp_path / "gone").exists()
    (tmp_path / "go").touch()
    wait_until((tmp_path / "gone").exists)
    assert cli.main(["launch", "--follow", done.stdout.strip()]) == 0


def test_commands_are_those_of_the_kind():
    ours, torchrun = (
        json.loads(kind.render(job()).files["commands.json"])["commands"][0] for kind in (Local(), Torchrun())
    )
    assert ours[:4] == [sys.executable, "-m", "megatron_fleet.cli", "train"] and ours[-1].startswith("run.id=")
    assert torchrun[0].endswith("launch/torchrun/train.sh") and os.access(torchrun[0], os.X_OK)
    with pytest.raises(UserError, match="starts everything on this machine"):
        Local().check(job(["parallel.data=2", "cluster.nodes=2"]))
