"""The verifier host: a small process that runs each verifier in a sandbox of its own.

``accept → fork a supervisor → fork a worker``: the worker gives up every right and runs the code, the supervisor holds
the deadline and tells the outcome, the host does nothing but accept. So no verifier, whatever it does, outlives its
deadline or reaches another one, the host or the environment server; ``sandbox.py`` says how.

It is started as a script with the interpreter's isolated mode and loads only the standard library: a small process
forks in well under a millisecond.

Wire format over a Unix socket: a JSON line (``Request``), then the two databases; the reply is one JSON line
``{"value": float | null, "reason": str}``.
"""

from __future__ import annotations

import gc
import json
import os
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
MAX_REPLY_BYTES = 4096
READ_TIMEOUT_S = 10.0


def main(listener_fd: int, parent_pid: int) -> None:
    """Serve until the parent process dies."""
    for name in PRELOADED:
        import_module(name)
    verify, sandbox = _load("verify"), _load("sandbox")
    missing = sandbox.enter()
    sandbox.die_with_parent(parent_pid)  # not before: a change of user clears it
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
                _supervise(connection, verify, sandbox, "namespaces" not in missing)
            finally:
                os._exit(0)
        connection.close()


def _load(name: str) -> ModuleType:
    """A module beside this file, without importing the package."""
    spec = util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _supervise(connection: socket.socket, verify: ModuleType, sandbox: ModuleType, namespaces: bool) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sandbox.die_with_parent(os.getppid())
    connection.settimeout(READ_TIMEOUT_S)
    with connection.makefile("rb") as stream:
        request = json.loads(stream.readline())
        seed = stream.read(request["seed_bytes"])
        current = stream.read(request["current_bytes"])
    reader, writer = os.pipe()
    supervisor = os.getpid()
    if namespaces:
        sandbox.separate()
    worker = os.fork()
    if worker == 0:
        try:
            _give_up_files(writer)
            # In its own namespace of processes it does not see its parent.
            sandbox.die_with_parent(None if namespaces else supervisor)
            sandbox.confine(request["limits"]["cpu_s"], request["limits"]["memory_bytes"])
            _work(writer, verify, request, seed, current)
        finally:
            os._exit(1)
    os.close(writer)
    said = _read_reply(reader, request["limits"]["wall_s"])
    os.kill(worker, signal.SIGKILL)
    _, _, used = os.wait4(worker, 0)
    outcome = _outcome(said, used.ru_utime + used.ru_stime, request["limits"])
    connection.sendall(json.dumps(outcome).encode() + b"\n")


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


def _outcome(said: bytes | None, cpu_s: float, limits: dict[str, Any]) -> dict[str, Any]:
    if said is None:
        return {"value": None, "reason": f"verifier ran past its deadline of {limits['wall_s']:g} s"}
    try:
        reply = json.loads(said)
        return {"value": reply["value"], "reason": str(reply["reason"])}
    except (ValueError, TypeError, KeyError):
        pass
    if cpu_s > 0.9 * limits["cpu_s"]:  # the kernel counts in ticks
        return {"value": None, "reason": f"verifier used its {limits['cpu_s']} s of CPU"}
    return {"value": None, "reason": "verifier process ended without a verdict"}


def _give_up_files(writer: int) -> None:
    """Keep the pipe for the verdict, and /dev/null, which is this process's input, as its output too."""
    os.setsid()
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.closerange(3, writer)
    os.closerange(writer + 1, 256)
    os.environ.clear()


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
