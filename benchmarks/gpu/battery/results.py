"""Results of parts: one JSON file each, written as they come, and what makes one current."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from battery.hardware import Device, Machine

ROOT = Path(__file__).resolve().parents[3]
Status = Literal["running", "done", "failed", "timeout", "interrupted", "skipped"]
FINAL = ("done", "failed", "timeout")
"""A part with another status is run again: what it lacked may be there now."""


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments for the process of a part.

    Attributes:
        part: its name.
        module: the one that measures it.
        size: ``full``, or ``tiny`` for a run of the same code on a CPU.
        seconds: after these it is ended.
        result: path of its JSON file.
        scratch: folder for temporary files, removed afterwards.
        keep: folder for files that belong to the result.
        gpus: how many it may use.
    """

    part: str
    module: str
    device: Device
    size: Literal["full", "tiny"]
    seconds: float
    result: str
    scratch: str
    keep: str
    gpus: int = 1


@dataclass(slots=True)
class Result:
    """Content of a JSON file.

    Attributes:
        reason: why the part was skipped, failed or ended, in one line.
        figures: name → value; `battery.registry` says what each means.
        tables: name → rows.
        left_out: what was not measured → why.
        problems: what went wrong → message; a part with one has failed, its other figures hold.
        files: names of files beside the JSON file.
        doing: what is being measured now.
    """

    part: str
    status: Status = "running"
    reason: str = ""
    code: str = ""
    commit: str = ""
    size: str = "full"
    started: str = ""
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    error: str = ""
    doing: str = ""

    def is_current(self, code: str, machine: Machine, size: str) -> bool:
        """Whether the part need not be run again: it ended, with the same code, device and size."""
        here = (self.code, self.machine.get("device"), self.size) == (code, machine.device, size)
        return here and self.status in FINAL

    def write(self, path: Path) -> None:
        """Replace the file; a reader sees the old content or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def read(path: Path) -> Result | None:
    """The result in a file; ``None`` without one, or where it is none of these."""
    try:
        return Result(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class Unavailable(Exception):
    """Raised by a part that cannot be measured here; the message is the reason."""


class Sink(Protocol):
    """Receiver of measurements, as they come."""

    def doing(self, what: str) -> None:
        """Say what is measured next."""

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table."""

    def figures(self, **values: Any) -> None:
        """Set figures."""

    def leave_out(self, what: str, why: str) -> None:
        """Say that something is not measured."""

    def problem(self, what: str, message: str) -> None:
        """Say that something went wrong."""


class Report:
    """`Sink` into the part's JSON file.

    Attributes:
        result: what was measured so far.
    """

    def __init__(self, request: Request, result: Result) -> None:
        self.result, self._path = result, Path(request.result)
        self._began, self._end = time.monotonic(), time.monotonic() + request.seconds

    def seconds_left(self) -> float:
        """Seconds until the part is ended."""
        return self._end - time.monotonic()

    def doing(self, what: str) -> None:
        self.result.doing = what
        print(f"[{time.monotonic() - self._began:7.1f} s] {what}", flush=True)
        self.write()

    def row(self, table: str, **values: Any) -> None:
        self.result.tables.setdefault(table, []).append(values)
        print(f"    {table}: {json.dumps(values)}", flush=True)
        self.write()

    def figures(self, **values: Any) -> None:
        self.result.figures |= values
        print(f"    {json.dumps(values)}", flush=True)
        self.write()

    def leave_out(self, what: str, why: str) -> None:
        self.result.left_out[what] = why
        print(f"    left out: {what}: {why}", flush=True)
        self.write()

    def problem(self, what: str, message: str) -> None:
        self.result.problems[what] = message
        print(f"    PROBLEM: {what}: {message}", flush=True)
        self.write()

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Rows of a table so far."""
        return self.result.tables.get(table, [])

    def file(self, name: str) -> None:
        """Name a file in `Request.keep` that belongs to the result."""
        self.result.files.append(name)
        self.write()

    def close(self, error: BaseException | None = None) -> None:
        """Write the final status."""
        result = self.result
        if isinstance(error, Unavailable):
            result.status, result.reason = "skipped", str(error)
        elif error is not None:
            result.status, result.reason = "failed", first_line(error)
            result.error = "".join(traceback.format_exception(error))
        elif result.problems:
            what, message = next(iter(result.problems.items()))
            result.status, result.reason = "failed", f"{what}: {message}"
        else:
            result.status = "done"
        result.doing = ""
        self.write()

    def write(self) -> None:
        self.result.seconds = round(time.monotonic() - self._began, 1)
        self.result.write(self._path)


def first_line(error: BaseException) -> str:
    """Type and first line of the message of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def code_version() -> str:
    """Hash of the sources and configurations that a result depends on, also where there is no git."""
    total = hashlib.sha256()
    for folder, pattern in (("megatron_fleet", "*.py"), ("configs", "*.yaml"), ("benchmarks/gpu/battery", "*.py")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def commit() -> str:
    """Commit of the checkout, with ``-dirty`` where files differ from it; empty without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
