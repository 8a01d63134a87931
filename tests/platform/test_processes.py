"""Stack traces of hanging children, low priorities, imports without garbage collection, and how processes end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from megatron_fleet.platform.processes import run_processes, stacks

STACKS = """
import subprocess, sys, time
from megatron_fleet.platform.processes import stacks_written_after, write_stacks_on_signal

def child_hangs():
    write_stacks_on_signal()
    print("ready", flush=True)
    time.sleep(3600)

def parent_hangs():
    sys.stdin.readline()

if sys.argv[1:] == ["child"]:
    child_hangs()
able = subprocess.Popen([sys.executable, __file__, "child"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
unable = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
able.stdout.readline()
with stacks_written_after(3600):
    pass
with stacks_written_after(0.01):
    parent_hangs()
print([child.poll() for child in (able, unable)])
able.kill(), unable.kill()
"""
PRIORITY = """
import os, sys
from megatron_fleet.platform.processes import take_normal_priority
os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[1]))
if len(sys.argv) > 2:
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
take_normal_priority()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""
NOBODY = "65534"

as_root = pytest.mark.skipif(os.getuid() != 0, reason="priorities are root's to raise")


def test_stacks_of_a_process_and_of_its_children(tmp_path):
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(STACKS)
    with told.open("w") as errors:
        run = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    # It hangs until both are there.
    wait_until(
        lambda: all(name in told.read_text() for name in ("in parent_hangs", "in child_hangs")),
        lambda: run.poll() is None,
    )
    out, _ = run.communicate("\n", timeout=HANG_S)
    assert run.returncode == 0 and out == "[None, None]\n", told.read_text()
    assert told.read_text().count("in parent_hangs") == told.read_text().count("in child_hangs") == 1


@pytest.mark.parametrize("py_spy", [None, Path("/nonexistent")])
def test_stacks_are_read_from_outside_or_else_written_by_the_processes(tmp_path, py_spy):
    """Some containers do not permit the first; nothing ends in either case."""
    script, told = tmp_path / "script.py", tmp_path / "told"
    script.write_text(STACKS)
    with told.open("w") as errors:
        able = subprocess.Popen([sys.executable, script, "child"], stdout=subprocess.PIPE, stderr=errors)
    unable = subprocess.Popen(["sleep", "3600"])
    try:
        able.stdout.readline()
        assert {os.getpid(), able.pid} <= set(run_processes()) and unable.pid not in run_processes()
        _, own, of_able, of_unable = stacks([os.getpid(), able.pid, unable.pid], py_spy).split("== ")
        assert "test_stacks_are_read" in own and "child_hangs" in of_able and "no stacks: py-spy: " in of_unable
        assert of_able.startswith(f"pid {able.pid}, python") and "told\n" in of_able
        assert able.poll() is None and unable.poll() is None
        os.kill(able.pid, signal.SIGSTOP)
        wait_until(lambda: "T (stopped)" in stacks([able.pid], Path("/nonexistent")).splitlines()[0])
        spied = 'File "' not in of_able
        assert ("child_hangs" in stacks([able.pid], py_spy)) == spied
    finally:
        for process in (able, unable):
            process.kill()
            process.communicate()
    assert "no stacks: " in stacks([able.pid], py_spy)


def at(nice: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRIORITY, str(nice), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)


@as_root
def test_a_low_priority_is_raised():
    done = at(15)
    assert (done.stdout, done.stderr) == ("0\n", "")


@as_root
def test_who_may_not_says_so():
    done = at(15, NOBODY)
    assert done.stdout == "15\n"
    assert "runs at nice 15 and may not change that" in done.stderr and "RAY_worker_niceness=0" in done.stderr


@as_root
def test_nothing_is_done_at_normal_priority():
    done = at(0, NOBODY)
    assert (done.stdout, done.stderr) == ("0\n", "")


IMPORTING = """
import gc, multiprocessing
from megatron_fleet.platform.processes import children_import_uncollected, imports_uncollected

def child(answer):
    answer.send(gc.isenabled())

def ask():
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(there,))
    process.start()
    print(here.recv())
    process.join()

if __name__ == "__main__":
    with imports_uncollected():
        made = [[] for _ in range(1000)]
        print(gc.isenabled())
    print(gc.isenabled(), gc.get_freeze_count() > 1000)
    with children_import_uncollected():
        ask()
    ask()
"""
"""Prints whether garbage collection is enabled during imports, after them, and in two children."""


def test_garbage_collection_is_off_during_imports(tmp_path):
    (tmp_path / "importing.py").write_text(IMPORTING)
    command = [sys.executable, "importing.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.split() == ["False", "True", "True", "False", "True"], done.stderr


LEAVING = """
import atexit, sys, threading, time
from megatron_fleet.platform.processes import leave

class Kept:
    def __del__(self):
        print("freed")

kept = Kept()
atexit.register(print, "told at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("the thread has ended"))).start()
leave(5)
"""


def test_leaving_waits_for_threads_and_frees_nothing():
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (5, "the thread has ended\ntold at exit\n"), done.stderr
