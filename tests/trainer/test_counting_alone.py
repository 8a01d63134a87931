"""Tests that play a device on this host run in a process of their own: what they leave behind changes later models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("megatron_fleet.trainer.megatron")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_counts.py", "test_device_waits.py"])
def test_in_a_process_of_its_own(name):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        Path(__file__).with_name(name),
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"MFLEET_TEST_COUNTS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=4 * HANG_S)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
