"""`mfleet top`: one frame of a run that goes on, of one that was killed, and of one that says nothing."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from megatron_fleet import cli
from megatron_fleet.analysis.live.follow import RunFollower
from megatron_fleet.analysis.top import BAR, frame
from megatron_fleet.telemetry.sinks import MetricsLog
from megatron_fleet.telemetry.status import Alert, EngineStatus, EnvironmentStatus, PhaseStatus, RunStatus

CLOCK = 1000.0
STATUS = RunStatus(
    name="demo", id="demo_1", state="running", host="node-0", pid=7, time=CLOCK, started=0.0, step=4, steps=8,
    step_began=960.0,
    phases=[PhaseStatus("to_trainer", 960.0, 10.0), PhaseStatus("rollout", 970.0, None, 12, 32)],
    engines=[
        EngineStatus("engine 0", True, 8.0, 2.0, 0.34, 512.0),
        EngineStatus("engine 1", False),
    ],
    environments={"shop": EnvironmentStatus(9, 8, 0.5, 20, 15, 0), "bank": EnvironmentStatus(3, 0, None, 0, 0, 3)},
    playing=20, waiting=5,
    memory={"controller": 1 << 30, "ranks": 2 << 30, "host_used": 3 << 30, "host_total": 8 << 30},
    alerts=[Alert(900.0, "WARNING", "step 3: rollout has taken 9 min so far")],
)  # fmt: skip


def lines(folder, clock=CLOCK, width=160):
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(frame(RunFollower(folder), clock))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def the(found, *words):
    (line,) = (line for line in found if all(word in line for word in words))
    return line.split()


def test_a_frame_shows_what_the_run_does_now(simple_run):
    STATUS.write(simple_run)
    found = lines(simple_run)
    assert "running" in the(found, "demo", "process 7 on node-0")
    assert the(found, "4 of 8")[0] == "steps"
    assert the(found, "now")[1:] == ["rollout", "12/32", "for", "30", "s"]
    assert the(found, "episodes", "waiting")[1:5] == ["20", "playing", "5", "waiting"]
    current = the(found, "step 5")
    assert current[2] == "m" * (BAR // 4) + "g" * (BAR - BAR // 4)
    assert current[-2:] == ["40", "s"]
    assert the(found, "engine 0")[2:] == ["serving", "8", "2", "34", "%", "512"]
    assert the(found, "engine 1")[2:4] == ["not", "serving"]
    assert "9 ended, reward 0.50" in " ".join(the(found, "shop"))
    assert "3 not played: quarantine" in " ".join(the(found, "bank"))
    assert the(found, "whole host")[-3:] == ["3.0", "of", "8.0"]
    assert "step 3: rollout has taken 9 min so far" in " ".join(the(found, "9 min"))


def test_finished_steps_have_a_bar_of_their_phases(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", None)
    log.write(1, {"timing/step": 20.0, "timing/rollout_wait": 10.0, "timing/policy_train": 10.0})
    log.write(2, {"timing/step": 40.0, "timing/rollout_wait": 20.0, "timing/sync_weights": 10.0})
    bars = {line.split()[1]: line.split()[2] for line in lines(tmp_path) if line.startswith("step ")}
    assert bars == {"2": "g" * 20 + "s" * 10 + "o" * 10, "1": "g" * 10 + "t" * 10}
    assert list(bars) == ["2", "1"]


def test_a_run_that_was_killed_is_silent(simple_run):
    STATUS.write(simple_run)
    assert the(lines(simple_run, CLOCK + 300), "demo")[1:5] == ["silent", "for", "5", "min"]


def test_names_cannot_command_the_terminal(simple_run):
    replace(STATUS, name="\x1b[2J[bold]x", alerts=[Alert(1.0, "ERROR", "\x1b]0;owned\x07")]).write(simple_run)
    text = "\n".join(lines(simple_run))
    assert "\x1b" not in text and "\x07" not in text and "[bold]x" in text and "owned" in text


def test_the_command_prints_one_frame(simple_run, capsys):
    replace(STATUS, time=time.time()).write(simple_run)
    assert cli.main(["top", str(simple_run), "--once"]) == 0
    assert "engine 0" in capsys.readouterr().out


@pytest.mark.parametrize("status", ["{}", "[", '{"step": "x"}'])
def test_a_damaged_status_is_a_note(simple_run, status):
    (simple_run / "status.json").write_text(status)
    found = "\n".join(lines(simple_run))
    assert "status.json" in found and "remove it" in found


def test_a_missing_folder_is_a_user_error(tmp_path, capsys):
    assert cli.main(["top", str(tmp_path / "none"), "--once"]) == 2
    assert "no such folder" in capsys.readouterr().err
