"""Where the interpreter of the episode environment is looked for."""

import sys

import pytest

from megatron_fleet.cluster.launcher import episode_python
from megatron_fleet.config.errors import UserError


def test_it_is_the_one_named_in_the_environment(monkeypatch):
    monkeypatch.setenv("MFLEET_EPISODE_PYTHON", sys.executable)
    assert str(episode_python()) == sys.executable


def test_a_name_that_is_not_a_program_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("MFLEET_EPISODE_PYTHON", str(tmp_path))
    with pytest.raises(UserError, match=r"MFLEET_EPISODE_PYTHON=.* is not a program"):
        episode_python()


def test_the_neighbour_is_used_and_its_absence_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("MFLEET_EPISODE_PYTHON", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "engine"))
    with pytest.raises(UserError, match="episode environment is missing"):
        episode_python()
    python = tmp_path / "episode" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert episode_python() == python
