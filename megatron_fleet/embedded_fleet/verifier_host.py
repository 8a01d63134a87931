"""Verifier host: a small process that runs each verifier in a sandbox of its own.

``accept → fork a worker``: the worker reads the request, drops all privileges and runs the code; the host enforces the
deadline and reports the outcome. No verifier can therefore outlive its deadline or reach another one, the host or the
environment server; see ``sandbox.py``.

It is started as a script in the interpreter's isolated mode and loads only the standard library: a small process forks
in well under a millisecond.

Protocol over a Unix socket: a JSON line (the request), then the two databases; the reply is one JSON line
``{"value": float | null, "reason": str}``.
"""

from __future__ import annotations

import gc
import json
import math
import os
import select
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from types import ModuleType
from typing import Any

# The worker cannot open files, so modules that a verifier may import are loaded before the forks.
PRELOADED = (
    *("ast", "bisect", "calendar", "collections", "copy", "dataclasses", "datetime", "decimal", "difflib", "enum"),
    *("functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "sqlite3", "statistics"),
    *("string", "textwrap", "time", "typing", "unicodedata", "urllib.parse"),
)
SAMPLE = """
def validate_task(env, final_answer=None):
    rows = env.db("current").query("SELECT value FROM sample WHERE value = ?", (1,))
    return float(len(rows) == len(env.db("seed").query("SELECT value FROM sample")))
"""
"""Verifier run once before the forks, which then share the memory that a first run allocates and save the page
faults."""
FORBIDDEN = ("ctypes", "_ctypes")
"""Modules that no verifier can import: what they call is stopped by the sandbox, which is one layer less to rely on."""
MAX_REPLY_BYTES, MAX_REASON_CHARS = 4096, 500
MAX_VERDICT = 1e30
"""Largest magnitude of a verdict, as of any other environment's reward."""
READ_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Running:
    """A running verifier. ``reader``: read end of the pipe on which its worker reports the verdict."""

    connection: socket.socket
    worker: int
    reader: int
    deadline: float
    said: bytes = b""


class VerifierHost:
    """Serves concurrent verifications until the parent process dies."""

    def __init__(
        self, listener: socket.socket, limits: dict[str, Any], parent_pid: int, may_lack: Sequence[str]
    ) -> None:
        """``may_lack``: layers of the sandbox that this machine lacked before; without another one, SystemExit."""
        for name in PRELOADED:
            import_module(name)
        self._verify, self._sandbox = _load("verify"), _load("sandbox")
        for name in [name for name in sys.modules if name.partition(".")[0] in FORBIDDEN]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Forbidden)
        missing = self._sandbox.enter()
        if lost := [f"{name} ({why})" for name, why in missing.items() if name not in may_lack]:
            sys.exit(f"error: verifiers have lost a layer of their sandbox, so none is run: {', '.join(lost)}")
        self._sandbox.die_with_parent(parent_pid)  # not before: a change of user clears it
        self._namespaces = "namespaces" not in missing
        self._listener, self._limits = listener, limits
        self._running: dict[int, Running] = {}
        self._poll = select.poll()

    def serve(self) -> None:
        self._poll.register(self._listener, select.POLLIN)
        self._warm_up()
        gc.freeze()
        while True:
            for descriptor, _ in self._poll.poll(self._time_left_ms()):
                if descriptor == self._listener.fileno():
                    self._begin(self._listener.accept()[0])
                elif self._has_said_all(self._running[descriptor]):
                    self._end(descriptor, late=False)
            now = time.monotonic()
            for descriptor in [reader for reader, running in self._running.items() if running.deadline <= now]:
                self._end(descriptor, late=True)

    def _warm_up(self) -> None:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.execute("CREATE TABLE sample (value)")
            content = connection.serialize()
        self._verify.run_verifier(SAMPLE, content, content, "", [])

    def _time_left_ms(self) -> int | None:
        if not self._running:
            return None
        earliest = min(running.deadline for running in self._running.values())
        return max(0, math.ceil(1000 * (earliest - time.monotonic())))

    def _begin(self, connection: socket.socket) -> None:
        reader, writer = os.pipe()
        host = os.getpid()
        try:
            worker = self._sandbox.fork(self._namespaces)
        except OSError:
            # The machine has no process left. The closed connection shows that to the caller; pause before the next.
            os.close(reader)
            os.close(writer)
            connection.close()
            time.sleep(0.1)
            return
        if worker == 0:
            try:
                # In its own PID namespace it does not see its parent.
                self._sandbox.die_with_parent(None if self._namespaces else host)
                self._work(connection, writer)
            finally:
                os._exit(1)
        os.close(writer)
        self._running[reader] = Running(connection, worker, reader, time.monotonic() + self._limits["wall_s"])
        self._poll.register(reader, select.POLLIN)

    def _work(self, connection: socket.socket, writer: int) -> None:
        """Run in the worker: read the request, drop all privileges, run the code."""
        connection.settimeout(READ_TIMEOUT_S)
        with connection.makefile("rb") as stream:
            request = json.loads(stream.readline())
            seed = stream.read(request["seed_bytes"])
            current = stream.read(request["current_bytes"])
        _give_up_files(writer)
        self._sandbox.confine(self._limits["cpu_s"], self._limits["memory_bytes"])
        try:
            value: float | None = self._verify.run_verifier(
                request["code"], seed, current, request["final_answer"], request["conversation"]
            )
            reason = "verified"
        except BaseException as error:
            value, reason = None, f"verifier failed: {_describe(error)}"
        os.write(writer, json.dumps({"value": value, "reason": reason[:MAX_REASON_CHARS]}).encode())

    def _has_said_all(self, running: Running) -> bool:
        """Read more; return whether the worker closed the pipe or wrote more than a verdict."""
        chunk = os.read(running.reader, MAX_REPLY_BYTES)
        running.said += chunk
        return not chunk or len(running.said) > MAX_REPLY_BYTES

    def _end(self, reader: int, late: bool) -> None:
        running = self._running.pop(reader)
        self._poll.unregister(reader)
        os.close(reader)
        os.kill(running.worker, signal.SIGKILL)
        _, _, used = os.wait4(running.worker, 0)
        outcome = self._outcome(None if late else running.said, used.ru_utime + used.ru_stime)
        try:
            running.connection.settimeout(READ_TIMEOUT_S)
            running.connection.sendall(json.dumps(outcome).encode() + b"\n")
        except OSError:
            pass  # the caller is gone
        running.connection.close()

    def _outcome(self, said: bytes | None, cpu_s: float) -> dict[str, Any]:
        if said is None:
            return {"value": None, "reason": f"verifier ran past its deadline of {self._limits['wall_s']:g} s"}
        try:
            # A verifier can write to the pipe itself.
            reply = json.loads(said)
            value, reason = reply["value"], str(reply["reason"])[:MAX_REASON_CHARS]
            if value is None or (type(value) in (int, float) and abs(value) <= MAX_VERDICT):
                return {"value": value, "reason": reason}
            return {"value": None, "reason": f"verifier's verdict is not a number of at most {MAX_VERDICT:g}"}
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        # The kernel enforces the limit by counting ticks, and on busy cores it charges more of them than were used.
        if cpu_s > 0.5 * self._limits["cpu_s"]:
            return {"value": None, "reason": f"verifier used its {self._limits['cpu_s']} s of CPU"}
        return {"value": None, "reason": "verifier process ended without a verdict"}


class _Forbidden:
    """Finder that refuses what is in FORBIDDEN."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"a verifier cannot import {name}")


def _load(name: str) -> ModuleType:
    """Load a module next to this file without importing the package."""
    spec = util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _give_up_files(writer: int) -> None:
    """Close all files but the pipe for the verdict; /dev/null, already the input, becomes the output too."""
    os.setsid()
    os.dup2(0, 1)
    os.dup2(0, 2)
    os.closerange(3, writer)
    os.closerange(writer + 1, 256)
    os.environ.clear()


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__


if __name__ == "__main__":
    _, descriptor, parent, limits, may_lack = sys.argv
    VerifierHost(socket.socket(fileno=int(descriptor)), json.loads(limits), int(parent), json.loads(may_lack)).serve()
