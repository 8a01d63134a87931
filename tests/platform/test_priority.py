"""Processes that something else started at a low priority."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from waiting import HANG_S

PROGRAM = """
import os, sys
import megatron_fleet.platform.priority as priority
os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[1]))
if len(sys.argv) > 2:
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
priority.take_normal_priority()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""
NOBODY = "65534"

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="priorities are root's to raise")


def at(nice: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(nice), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)


def test_a_low_priority_is_raised():
    done = at(15)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_who_may_not_says_so():
    done = at(15, NOBODY)
    assert done.stdout == "15\n"
    assert "runs at nice 15 and may not change that" in done.stderr and "RAY_worker_niceness=0" in done.stderr


def test_nothing_is_done_at_normal_priority():
    done = at(0, NOBODY)
    assert (done.stdout, done.stderr) == ("0\n", "")
