"""Janitor: a small process that outlives a run's driver just long enough to clean up after it.

Ray ends with its driver, but the engines' own children, shared-memory files and Ray's folder may remain, especially
when the driver is killed. The janitor watches the driver; when the driver dies, or requests it, the janitor kills every
process that carries the run's mark in its environment and removes the run's files. It uses only the standard library
and runs in its own session, so that it survives a killed process group and a broken Python environment.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "MEGATRON_FLEET_RUN"
"""Environment variable that marks the processes of a run; its value is the run's id."""
LOOK, CLOSE = b"l", b"c"
GRACE_S = 2.0
"""Seconds that the processes of a dead driver have to exit by themselves."""


def marks(run_id: str) -> dict[str, str]:
    """Return the variables that mark every process of a run.

    SPT_NOENV keeps setproctitle, which Ray's agents and vLLM call, from overwriting the process's environment and with
    it the mark.
    """
    return {MARK: run_id, "SPT_NOENV": "1"}


class Janitor:
    """Owner's handle of the janitor process, which cleans up and exits on ``close`` or when the owner dies."""

    def __init__(self, run_id: str, folder: Path) -> None:
        """Args: ``run_id``: value of ``MARK`` in the run's processes. ``folder``: removed at the end."""
        from megatron_fleet.config.secrets import without_secrets  # the janitor itself needs the standard library alone

        command = [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), run_id, str(folder)]
        self._process = subprocess.Popen(
            command,
            env=without_secrets(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def look(self) -> None:
        """Record the shared-memory files in use; call it before a graceful shutdown of the processes."""
        self._tell(LOOK)
        self._stdout.read(1)

    def close(self, timeout_s: float = 30.0) -> None:
        """Trigger the cleanup and wait for it."""
        self._tell(CLOSE)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()
        self._process.wait(timeout_s)

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(word)
            self._stdin.flush()


def marked(run_id: str) -> list[int]:
    """Return the pids of this user's live processes of a run."""
    mark = f"{MARK}={run_id}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def shared_files(pids: list[int]) -> set[str]:
    """Return the files of /dev/shm that the processes have mapped and that still have a name.

    Files are matched by inode where the mapped name is gone: the C library creates semaphores under a temporary name
    and links them later.
    """
    files, names = set(), {}
    with contextlib.suppress(FileNotFoundError):
        names = {entry.inode(): entry.path for entry in os.scandir("/dev/shm")}
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                *_, inode, path = line.split(maxsplit=5) if "/dev/shm/" in line else ("0", "")
                path = names.get(int(inode), "") if path.endswith(" (deleted)") else path
                if path.startswith("/dev/shm/"):
                    files.add(path)
    return files


def sweep(run_id: str, files: set[str], folder: str, grace_s: float) -> None:
    """Kill the remaining processes of the run and remove its files."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and marked(run_id):
        time.sleep(0.05)
    while pids := marked(run_id):
        files |= shared_files(pids)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)
    shutil.rmtree(folder, ignore_errors=True)


def main(owner: int, run_id: str, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it must not end before its owner
    files: set[str] = set()
    try:
        watched = os.pidfd_open(owner)
    except OSError:
        return sweep(run_id, files, folder, GRACE_S)
    poller = select.poll()
    poller.register(watched, select.POLLIN)
    poller.register(sys.stdin, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll()}
        word = os.read(sys.stdin.fileno(), 1) if sys.stdin.fileno() in ready else b""
        if word == LOOK:
            files |= shared_files(marked(run_id))
            os.write(sys.stdout.fileno(), b".")
        elif word == CLOSE:
            return sweep(run_id, files, folder, grace_s=0.0)
        elif watched in ready:
            return sweep(run_id, files | shared_files(marked(run_id)), folder, GRACE_S)
        else:
            poller.unregister(sys.stdin)  # the owner closed the pipe but is still alive


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
