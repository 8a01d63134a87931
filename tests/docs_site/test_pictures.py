"""Pictures of the documentation show nothing of the machine on which they were drawn."""

from __future__ import annotations

import getpass
import re
import socket
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette")
sys.path.append(str(Path(__file__).parents[2] / "tools"))
import live_picture

from megatron_fleet.analysis.live import view
from megatron_fleet.analysis.live.follow import RunFollower

ROOT = Path(__file__).parents[2]
MACHINE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|var|mnt|data|opt|usr|Users|private)/[\w.-]+")
"""An absolute path."""


def machine_names(text: str) -> list[str]:
    return [*MACHINE.findall(text), *(name for name in {socket.gethostname(), str(ROOT)} if name in text)]


def test_the_live_picture_shows_a_run_without_a_machine(tmp_path):
    live_picture.write_run(tmp_path / "quickstart")
    follower = RunFollower(tmp_path / "quickstart")
    follower.look()
    shown = view.now(follower, time.time())
    assert shown["subtitle"] == "quickstart · model assets/tiny" and shown["state"]["text"] == "running"
    assert len(shown["timeline"]["steps"]) == live_picture.LAST and shown["notes"] == []
    assert machine_names(f"{shown} {view.curves(follower)}") == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_no_drawing_names_a_machine(picture):
    text = picture.read_text(encoding="utf-8")
    assert machine_names(text) == [] and f"/{getpass.getuser()}/" not in text


@pytest.mark.parametrize("text", ["run · model /data/models/tiny", "/tmp/model", f"at {ROOT}/x"])
def test_a_path_of_a_machine_is_found(text):
    assert machine_names(text)
