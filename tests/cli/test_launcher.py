"""The launcher starts the ranks, passes signals on once, and ends all of them when one ends badly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("hydra")

DRIVER = """
import sys
from pathlib import Path
from megatron_fleet.cluster import launcher
from megatron_fleet.config.load import load

launcher.FAILURE_DEADLINE_S = 1.5
out, ranks, rank_program, stop_deadline_s = sys.argv[1:]
launcher.STOP_DEADLINE_S = float(stop_deadline_s)
config = load(["experiment=quickstart", f"run.out={out}", f"parallel.data={ranks}", "policy.threads=3"])
sys.exit(launcher.launch(config, lambda file: [sys.executable, "-c", rank_program, str(file)]))
"""

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
out = Path(sys.argv[1]).parent
def mark(name):
    (out / f"{name}_{rank}").write_text(str(os.getpid()))
"""


def start(out: Path, ranks: int, program: str, stop_deadline_s: float = 6.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(out), str(ranks), PRELUDE + program, str(stop_deadline_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(out: Path, ranks: int, program: str) -> tuple[int, str]:
    process = start(out, ranks, program)
    _, errors = process.communicate(timeout=40)
    return process.returncode, errors


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 20
    while not all(f.exists() and f.read_text() for f in files):
        assert time.monotonic() < deadline, "a rank did not start"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(*files: Path) -> None:
    deadline = time.monotonic() + 5
    while any(alive(int(f.read_text())) for f in files):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.02)


def test_every_rank_gets_its_place_and_the_configuration(tmp_path):
    program = """
import json
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS".split()
(out / f"env_{rank}.json").write_text(json.dumps({n: os.environ[n] for n in names}))
print("hello from", rank)
"""
    status, errors = run(tmp_path, 3, program)
    assert status == 0
    assert errors == ""  # a good end is told by rank 0
    ranks = [json.loads((tmp_path / f"env_{rank}.json").read_text()) for rank in range(3)]
    assert [r["RANK"] for r in ranks] == [r["LOCAL_RANK"] for r in ranks] == ["0", "1", "2"]
    assert {(r["WORLD_SIZE"], r["MASTER_ADDR"], r["OMP_NUM_THREADS"]) for r in ranks} == {("3", "127.0.0.1", "3")}
    assert len({r["MASTER_PORT"] for r in ranks}) == 1
    assert json.loads((tmp_path / "config.json").read_text())["parallel"]["data"] == 3
    assert (tmp_path / "logs" / "rank_2.log").read_text() == "hello from 2\n"
    assert not (tmp_path / "logs" / "rank_0.log").exists()


def test_a_failed_rank_stops_the_others_and_is_named(tmp_path):
    program = """
mark("started")
if rank == 1:
    time.sleep(0.3)
    print("the reason", flush=True)
    sys.exit(7)
time.sleep(60)
"""
    status, errors = run(tmp_path, 3, program)
    assert status == 7
    log = tmp_path / "logs" / "rank_1.log"
    assert errors == f"error: rank 1 ended with status 7 (the reason); its log is {log}.\n"
    assert_gone(*(tmp_path / f"started_{rank}" for rank in range(3)))


def test_rank_0_tells_its_own_failure_although_the_others_leave_first(tmp_path):
    program = """
if rank == 1:
    sys.exit(3)
time.sleep(0.6)
sys.exit("error: the cause")
"""
    assert run(tmp_path, 2, program) == (1, "error: the cause\n")


def test_bad_input_found_by_one_rank_alone_is_told_for_it(tmp_path):
    program = """
if rank == 1:
    print("error: bad input")
    sys.exit(2)
time.sleep(60)
"""
    status, errors = run(tmp_path, 2, program)
    assert status == 2
    assert "rank 1 ended with status 2 (error: bad input)" in errors


def test_a_rank_deaf_to_signals_is_killed_after_the_deadline(tmp_path):
    program = """
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
mark("started")
while rank == 1 and not (out / "started_0").exists():
    time.sleep(0.02)
if rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60)
"""
    status, errors = run(tmp_path, 2, program)
    assert status == 128 + signal.SIGSEGV
    assert "rank 1 was killed by SIGSEGV" in errors
    assert_gone(tmp_path / "started_0")


def test_what_a_dead_rank_started_goes_with_it(tmp_path):
    program = """
if os.fork() == 0:
    mark("child")
    time.sleep(60)
while not (out / "child_0").exists():
    time.sleep(0.02)
"""
    assert run(tmp_path, 1, program)[0] == 0
    assert_gone(tmp_path / "child_0")


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_reaches_every_rank_once(tmp_path, number, name):
    program = """
count = 0
def heard(number, frame):
    global count
    count += 1
    (out / f"heard_{rank}").write_text(f"{number} {count}")
signal.signal(signal.SIGINT, heard)
signal.signal(signal.SIGTERM, heard)
mark("ready")
while not count:
    time.sleep(0.02)
time.sleep(0.5)
"""
    process = start(tmp_path, 2, program)
    wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors.startswith(f"mfleet: stopped by {name}; ")
    assert errors.count("\n") == 1
    assert {(tmp_path / f"heard_{rank}").read_text() for rank in (0, 1)} == {f"{int(number)} 1"}


def test_the_second_signal_kills(tmp_path):
    program = """
signal.signal(signal.SIGINT, lambda *_: mark("heard"))
mark("ready")
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    time.sleep(1)
"""
    process = start(tmp_path, 1, program, stop_deadline_s=600)
    wait_for(tmp_path / "ready_0")
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path / "heard_0")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)  # less than the rank would take, and than the deadline
    assert process.returncode == 130
    assert_gone(tmp_path / "ready_0")


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    process = start(tmp_path, 2, "mark('ready')\ntime.sleep(60)")
    wait_for(tmp_path / "ready_0", tmp_path / "ready_1")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert_gone(tmp_path / "ready_0", tmp_path / "ready_1")
