"""The verifier host: a small process that runs each verifier in a resource-limited child of its own.

``accept → fork a supervisor → fork a worker``: the worker gives up every privilege and runs the code, the supervisor
holds the deadline and tells the outcome, the host does nothing but accept. So no verifier, whatever it does, outlives
its deadline or reaches another one, the host or the environment server.

It is started as a script with the interpreter's isolated mode and loads only the standard library: a small process
forks in well under a millisecond.

Wire format over a Unix socket: a JSON line (``Request``), then the two databases; the reply is one JSON line
``{"value": float | null, "reason": str}``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

# The worker cannot open files, so what a verifier may import is loaded before the forks.
PRELOADED = (
    *("ast", "bisect", "calendar", "collections", "copy", "dataclasses", "datetime", "decimal", "difflib", "enum"),
    *("functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "sqlite3", "statistics"),
    *("string", "textwrap", "time", "typing", "unicodedata", "urllib.parse"),
)
NOBODY = 65534
MAX_REPLY_BYTES = 4096
READ_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def main(listener_fd: int, parent_pid: int) -> None:
    """Serve until the parent process dies."""
    die_with_parent(parent_pid)
    for name in PRELOADED:
        import_module(name)
    verify = _load_verify()
    listener = socket.socket(fileno=listener_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        try:
            pid = os.fork()
        except OSError:
            # The machine has no process left. The closed connection tells the caller; try again a little later.
            time.sleep(0.1)
            pid = -1
        if pid == 0:
            try:
                listener.close()
                _supervise(connection, verify)
            finally:
                os._exit(0)
        connection.close()


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent thread ends, or exit now when that has happened already."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def _load_verify() -> ModuleType:
    """The module ``verify.py`` beside this file, without importing the package."""
    spec = util.spec_from_file_location("verify", Path(__file__).with_name("verify.py"))
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _supervise(connection: socket.socket, verify: ModuleType) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(os.getppid())
    connection.settimeout(READ_TIMEOUT_S)
    with connection.makefile("rb") as stream:
        request = json.loads(stream.readline())
        seed = stream.read(request["seed_bytes"])
        current = stream.read(request["current_bytes"])
    reader, writer = os.pipe()
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        try:
            _confine(writer, request["limits"], supervisor)
            _work(writer, verify, request, seed, current)
        finally:
            os._exit(1)
    os.close(writer)
    said = _read_reply(reader, request["limits"]["wall_s"])
    os.kill(worker, signal.SIGKILL)
    _, status = os.waitpid(worker, 0)
    connection.sendall(json.dumps(_outcome(said, status, request["limits"])).encode() + b"\n")


def _read_reply(reader: int, wall_s: float) -> bytes | None:
    """What the worker wrote until it closed the pipe; ``None`` at the deadline."""
    deadline = time.monotonic() + wall_s
    said = b""
    while len(said) <= MAX_REPLY_BYTES:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(reader, MAX_REPLY_BYTES)
        if not chunk:
            break
        said += chunk
    return said


def _outcome(said: bytes | None, status: int, limits: dict[str, Any]) -> dict[str, Any]:
    if said is None:
        return {"value": None, "reason": f"verifier ran past its deadline of {limits['wall_s']:g} s"}
    try:
        reply = json.loads(said)
        return {"value": reply["value"], "reason": str(reply["reason"])}
    except (ValueError, TypeError, KeyError):
        pass
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return {"value": None, "reason": f"verifier used its {limits['cpu_s']} s of CPU"}
    return {"value": None, "reason": "verifier process ended without a verdict"}


def _confine(writer: int, limits: dict[str, Any], supervisor: int) -> None:
    """Give up everything but memory, CPU time and the reply pipe; the limits cannot be raised again."""
    os.setsid()
    devnull = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(devnull, stream)
    os.closerange(3, writer)
    os.closerange(writer + 1, 256)
    os.environ.clear()
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value + 1) if kind == resource.RLIMIT_CPU else (value, value))
    if os.getuid() == 0:
        # Root is exempt from the limit on processes.
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    # No new descriptor of any kind: no files, no sockets.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    # Last, because a change of user clears it.
    die_with_parent(supervisor)


def _work(writer: int, verify: ModuleType, request: dict[str, Any], seed: bytes, current: bytes) -> None:
    try:
        value: float | None = verify.run_verifier(
            request["code"], seed, current, request["final_answer"], request["conversation"]
        )
        reason = "verified"
    except BaseException as error:
        value, reason = None, f"verifier failed: {_describe(error)}"
    os.write(writer, json.dumps({"value": value, "reason": reason[:500]}).encode())


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
