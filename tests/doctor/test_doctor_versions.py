"""Installed packages against the locks, and the page of versions."""

import os
import sys

import pytest

pytest.importorskip("hydra")

from megatron_fleet.cluster.inventory import Host
from megatron_fleet.config.load import ROOT
from megatron_fleet.doctor import versions
from megatron_fleet.doctor.probe import ProbeContext
from megatron_fleet.doctor.versions import CPU, EPISODE, GPU, HOSTED, differences, pins


@pytest.mark.parametrize("files", [CPU, GPU, EPISODE, HOSTED])
def test_an_environment_of_its_lock_has_no_differences(files):
    there = pins(*files)
    assert len(there) > 50 and differences(there, files) == []
    assert differences({name.replace("-", "_").upper(): version for name, version in there.items()}, files) == []


def test_other_versions_and_missing_packages():
    there = pins(*GPU) | {"torch": "2.13.0+cu130"}  # what the wheel of the lock calls itself
    assert differences(there, GPU) == []
    there |= {"torch": "2.12.1", "not-of-ours": "1.0"}
    del there["transformer-engine"]
    assert differences(there, GPU) == ["transformer-engine is missing", "torch 2.12.1, not 2.13.0"]


def test_the_probe_names_them(monkeypatch, episode_python):
    here = ProbeContext(None, os.environ, Host("here"))
    monkeypatch.setattr(versions, "pins", lambda *names: {"pip": "0.1", "ray": "0.2"})
    result = versions.packages(here)
    assert result.status == "failed" and "engine: ray " in result.detail and ", not 0.2" in result.detail
    assert "episode: ray " in result.detail and result.fix.startswith("run ./setup.sh again")


def test_the_environment_of_hosted_runs_is_compared_with_its_own_lock(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/somewhere/.venv/hosted")
    result = versions.packages(ProbeContext(None, os.environ, Host("here")))
    assert result.status == "failed" and "engine: " not in result.detail  # this one has other packages
    assert result.fix.startswith("run ./setup.sh --hosted again")


def test_the_page_has_the_versions_of_the_requirements():
    page = (ROOT / "docs" / "run" / "versions.md").read_text(encoding="utf-8")
    assert versions.page() in page, "python -m megatron_fleet.doctor.versions writes the table"
