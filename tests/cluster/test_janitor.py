"""Whatever happens to the owner, the marked processes and the files of a run go; nothing else does."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from megatron_fleet.cluster.janitor import MARK, Janitor, marked

OWNER = """
import signal, sys, time
from pathlib import Path
from megatron_fleet.cluster.janitor import Janitor
signal.signal(signal.SIGINT, signal.default_int_handler)  # as a background job it would ignore it
janitor = Janitor(sys.argv[1], Path(sys.argv[2]))
print("up", flush=True)
time.sleep(3600)
"""


def _sleeper(run_id: str | None, shared: Path | None = None) -> subprocess.Popen:
    """A process that ignores every polite signal and holds a shared-memory file."""
    code = "import mmap,signal,sys,time\nfor s in (1,2,15): signal.signal(s, signal.SIG_IGN)\n"
    if shared is not None:
        shared.write_bytes(bytes(4096))
        code += f"f = open({str(shared)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 4096)\n"
    environment = os.environ | ({MARK: run_id} if run_id else {})
    process = subprocess.Popen([sys.executable, "-c", code + "print('up', flush=True)\ntime.sleep(3600)"],
                               env=environment, stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_all_goes_with_the_owner(tmp_path, end):
    run_id, folder = secrets.token_hex(4), tmp_path / "run"
    shared = Path(f"/dev/shm/mfleet-test-{run_id}")
    (folder / "session").mkdir(parents=True)
    victim, other = _sleeper(run_id, shared), _sleeper(None)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, run_id, str(folder)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout.readline() == b"up\n"
        owner.send_signal(end)
        owner.wait(HANG_S)
        assert victim.wait(HANG_S) == -signal.SIGKILL
        wait_until(lambda: not folder.exists())
        assert not shared.exists()
        assert other.poll() is None
    finally:
        for process in (victim, other, owner):
            process.kill()
            process.wait()


def test_closing_waits_until_all_is_gone(tmp_path):
    run_id = secrets.token_hex(4)
    shared = Path(f"/dev/shm/mfleet-test-{run_id}")
    victim = _sleeper(run_id, shared)
    janitor = Janitor(run_id, tmp_path / "absent")
    assert marked(run_id) == [victim.pid]
    janitor.look()
    victim.kill()  # an orderly end before the janitor's: the file is only known from the look
    victim.wait()
    janitor.close()
    assert not shared.exists() and marked(run_id) == []


def test_a_semaphore_goes_with_its_process(tmp_path):
    """The C library maps it before it has its name."""
    run_id = secrets.token_hex(4)
    code = "import multiprocessing, time\nlock = multiprocessing.get_context('spawn').Lock()\n"
    code += "print(lock._semlock.name, flush=True)\ntime.sleep(3600)"
    victim = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {MARK: run_id}, stdout=subprocess.PIPE,
                              start_new_session=True)  # fmt: skip
    semaphore = Path("/dev/shm", "sem." + victim.stdout.readline().decode().strip().lstrip("/"))
    assert semaphore.exists()
    Janitor(run_id, tmp_path / "absent").close()
    victim.wait()
    assert not semaphore.exists()
