"""Ranks as processes of one host: each learns its place, its end is reported, and nothing of it stays."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import HANG_S, until

from megatron_fleet.cluster import launcher
from megatron_fleet.cluster.joined_nodes import RanksOfHost
from megatron_fleet.cluster.launcher import LocalRanks

PRELUDE = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["MFLEET_RANK"])
def mark(name):
    Path(f"{name}_{rank}.tmp").write_text(str(os.getpid()))
    Path(f"{name}_{rank}.tmp").rename(f"{name}_{rank}")
"""
OWNER = """
import asyncio, sys
from pathlib import Path
from megatron_fleet.cluster.launcher import LocalRanks
from megatron_fleet.cluster.joined_nodes import RanksOfHost
async def main():
    ranks = LocalRanks(RanksOfHost((0, 1), 2, 1), Path("logs"), [sys.executable, "-c", sys.argv[1]])
    await ranks.start("h:1", "t")
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def local_ranks(program: str, ranks: RanksOfHost) -> LocalRanks:
    return LocalRanks(ranks, Path("logs"), [sys.executable, "-c", PRELUDE + program])


def two() -> RanksOfHost:
    return RanksOfHost((0, 1), 2, 1)


async def there(*files: str) -> None:
    await until(lambda: all(Path(f).exists() for f in files))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


async def assert_gone(*files: str) -> None:
    await until(lambda: not any(alive(int(Path(f).read_text())) for f in files))


async def test_every_rank_learns_its_place_and_its_devices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": "9", "SLURM_PROCID": "9", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    ranks = local_ranks(
        'Path(f"env_{rank}").write_text(json.dumps(dict(os.environ))); print("hello from", rank)',
        RanksOfHost((2, 5), 6, 3, "GPU-b,GPU-a"),
    )
    await ranks.start("h:1", "secret")
    await ranks.stop(HANG_S)
    said = [json.loads(Path(f"env_{rank}").read_text()) for rank in (2, 5)]
    assert [(s["MFLEET_LOCAL_RANK"], s["MFLEET_RANK"]) for s in said] == [("0", "2"), ("1", "5")]
    for each in said:
        assert (each["MFLEET_WORLD_SIZE"], each["MFLEET_LOCAL_WORLD_SIZE"], each["OMP_NUM_THREADS"]) == ("6", "2", "3")
        assert (each["MFLEET_CONTROLLER"], each["MFLEET_TOKEN"]) == ("h:1", "secret")
        assert each["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
        assert not {"RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"} & each.keys()
    assert Path("logs", "rank_5.log").read_text() == "hello from 5\n"


@pytest.mark.parametrize(
    ("visible", "set_by_user", "seen"),
    [(None, None, "passive"), (None, "active", "active"), ("GPU-a", None, None)],
    ids=["CPU", "CPU, set by the user", "GPU"],
)
async def test_ranks_on_cpus_wait_without_spinning(tmp_path, monkeypatch, visible, set_by_user, seen):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_by_user)
    ranks = local_ranks('print(os.environ.get("OMP_WAIT_POLICY"))', RanksOfHost((0,), 1, 2, visible))
    await ranks.start("h:1", "secret")
    await ranks.stop(HANG_S)
    assert Path("logs", "rank_0.log").read_text() == f"{seen}\n"


def test_the_openmp_of_torch_reads_the_wait_policy():
    pytest.importorskip("torch")
    (library,) = Path(importlib.util.find_spec("torch").origin).parent.glob("lib/libgomp*")
    load = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r})"]

    def spins(**policy):
        env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        shown = subprocess.run(load, env=env | {"OMP_DISPLAY_ENV": "verbose"} | policy, capture_output=True, text=True)
        return "GOMP_SPINCOUNT = '0'" not in shown.stderr and "GOMP_SPINCOUNT" in shown.stderr

    assert spins() and not spins(**launcher.ON_CPUS)


async def test_how_a_rank_ended_is_told_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = """
if rank == 1:
    print("the reason", flush=True)
    sys.exit(7)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    ranks = local_ranks(program, two())
    await ranks.start("h:1", "t")
    log = Path("logs", "rank_1.log")
    try:
        await until(lambda: len(ranks.ended()) == 2)
        assert await ranks.how_ended(1) == f"rank 1 ended with status 7 (the reason); its log is {log}"
        assert (ranks.failed() or "").startswith("rank 0 was killed by SIGSEGV")
    finally:
        await ranks.stop(0.0)
    assert ranks.ended() == {}


async def test_ranks_deaf_to_everything_go_after_the_deadline_with_what_they_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    mark("child")
else:
    mark("started")
time.sleep(3600)
"""
    ranks = local_ranks(program, two())
    await ranks.start("h:1", "t")
    files = [f"{kind}_{rank}" for kind in ("started", "child") for rank in (0, 1)]
    await there(*files)
    began = time.monotonic()
    await ranks.stop(0.3)
    assert time.monotonic() - began >= 0.3
    await assert_gone(*files)


async def test_the_event_loop_goes_on_while_killed_ranks_are_not_gone_yet(tmp_path, monkeypatch):
    """As while a driver releases the devices of a killed process."""
    monkeypatch.chdir(tmp_path)
    ranks = local_ranks("time.sleep(3600)", two())
    await ranks.start("h:1", "t")
    status, wait, polls = launcher._status, subprocess.Popen.wait, iter(range(10))

    def wait_for_the_dead(process):
        assert next(polls, None) is None, "it blocks until the process is gone"
        return wait(process)

    monkeypatch.setattr(launcher, "_status", lambda process: None if next(polls, None) is not None else status(process))
    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_the_dead)
    await ranks.stop(0.0)
    assert ranks.pids == []


async def test_ranks_do_not_outlive_a_killed_owner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = PRELUDE + 'mark("started")\ntime.sleep(3600)'
    owner = subprocess.Popen([sys.executable, "-c", OWNER, program])
    await there("started_0", "started_1")
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    await assert_gone("started_0", "started_1")
