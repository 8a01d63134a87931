"""Signals to `mfleet train`: the first ends the run in order, the second one at once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from megatron_fleet.loop.stopping import REQUEUE, until_stopped

PROGRAM = """
import asyncio, sys
from pathlib import Path
from megatron_fleet.loop.stopping import until_stopped
out = Path(sys.argv[1])
async def work(stop):
    (out / "ready").touch()
    try:
        await asyncio.sleep(3600)
    finally:
        (out / "closing").touch()
        await asyncio.sleep(float(sys.argv[2]))
        (out / "closed").touch()
sys.exit(asyncio.run(until_stopped(work)))
"""


def start(out: Path, closing_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(out), str(closing_s)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until((out / "ready").exists)
    return process


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_ends_the_run_in_order(tmp_path, number, name):
    process = start(tmp_path, closing_s=0.3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + number
    assert errors == f"mfleet: stopped by {name}; there is no checkpoint yet, the same command starts anew.\n"
    assert (tmp_path / "closed").exists()


def test_the_second_signal_ends_it_at_once(tmp_path):
    process = start(tmp_path, closing_s=3600)
    process.send_signal(signal.SIGINT)
    wait_until((tmp_path / "closing").exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and errors == "mfleet: ended at once by another Ctrl-C.\n"
    assert not (tmp_path / "closed").exists()


async def test_a_cancellation_without_a_signal_is_passed_on():
    running = asyncio.create_task(until_stopped(lambda stop: asyncio.sleep(3600)))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


SAVING = """
import asyncio, sys
from pathlib import Path
from megatron_fleet.loop.stopping import until_stopped
out = Path(sys.argv[1])
async def work(stop):
    stop.heeded = True
    (out / "ready").touch()
    try:
        await stop.interrupt(asyncio.sleep(3600))
    finally:
        await asyncio.sleep(0.2)
        stop.saved_step = 7
sys.exit(asyncio.run(until_stopped(work, eval(sys.argv[2]))))
"""


@pytest.mark.parametrize("cause", ["SIGTERM", "SIGUSR1", "run.time_limit_s=1"])
def test_a_run_that_has_saved_asks_to_be_started_again(tmp_path, cause):
    limit = cause.partition("=")[2] or "None"
    command = [sys.executable, "-c", SAVING, str(tmp_path), limit]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "ready").exists)
    if limit == "None":
        process.send_signal(signal.Signals[cause])
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == REQUEUE == 75
    assert errors == f"mfleet: stopped by {cause}; the same command resumes from step 7, which is saved.\n"
