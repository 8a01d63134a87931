"""One part in a process of its own: ended at its limit with all that it started, its result a JSON file in any case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from battery.hardware import NO_ENGINE, Device, Machine, environment, python_path
from battery.registry import Part
from battery.results import Request, Result, commit, read
from megatron_fleet.cluster.janitor import Janitor, marks
from megatron_fleet.config.secrets import without_secrets

GRACE_S = 20.0
"""Seconds between the request to end and the kill. ``mfleet train`` uses them to stop its engines."""
INTERVAL_S = 0.2
LOG_LINES = 15


def new_result(part: str, code: str, size: str, machine: Machine) -> Result:
    """A result to which nothing has been added yet."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Result(part, code=code, commit=commit(), size=size, started=started, machine=asdict(machine))


def run(
    part: Part,
    machine: Machine,
    out: Path,
    scratch: Path,
    *,
    device: Device,
    size: Literal["full", "tiny"],
    code: str,
    limit_s: float,
    tick: Callable[[Result | None], None] = lambda _: None,
) -> Result:
    """Run one part and return what its file holds in the end.

    Args:
        out: folder of the results; the part writes ``<name>.json``, ``logs/<name>.log`` and files in ``files``.
        scratch: folder in which the part gets one for temporary files.
        tick: called a few times a second with the result so far.
    """
    path, log = out / f"{part.name}.json", out / "logs" / f"{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    new_result(part.name, code, size, machine).write(path)
    mark = f"battery-{uuid.uuid4().hex[:12]}"
    folder = Path(tempfile.mkdtemp(prefix=f"{part.name}-", dir=scratch))
    gpus = 1 if part.gpus == 1 else machine.gpus
    places = {"result": str(path), "scratch": str(folder), "keep": str(out / "files")}
    request = Request(part.name, part.module, device, size, limit_s, **places, gpus=gpus)
    env = without_secrets(os.environ) | environment(device, gpus) | marks(mark)
    env |= {"PYTHONPATH": python_path(), NO_ENGINE: machine.engine_problem}
    janitor = Janitor(mark, folder)  # also where this process is killed
    timed_out = False
    try:
        with log.open("wb") as output:
            command = [sys.executable, "-m", "battery.child", json.dumps(asdict(request))]
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            end = time.monotonic() + limit_s
            while process.poll() is None and not (timed_out := time.monotonic() > end):
                time.sleep(INTERVAL_S)
                tick(read(path))
        finally:
            janitor.look()
            end_group(process)
    finally:
        janitor.close()
    return _final(path, log, process.returncode, limit_s if timed_out else None)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: a request first, then a kill."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _final(path: Path, log: Path, status: int, limit_s: float | None) -> Result:
    """The result, completed where the process could not."""
    result = read(path)
    assert result is not None, f"{path}: written before the process was started"
    if result.status == "running":
        if limit_s is not None:
            result.status = "timeout"
            result.reason = f"ended at its limit of {limit_s:.0f} s while measuring: {result.doing or 'its start'}"
        else:
            ended = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            result.status, result.reason = "failed", f"its process ended {ended}"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        result.error = "\n".join(lines[-LOG_LINES:])
        result.doing = ""
        result.write(path)
    return result
