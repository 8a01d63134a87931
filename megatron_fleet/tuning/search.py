"""Candidates, each measured in a process of its own, and the choice among them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_fleet.config.schema import Config
from megatron_fleet.config.secrets import without_secrets

OUT_OF_MEMORY = "out of memory"
"""Beginning of the problem of a candidate that took more memory than there is."""
_KILLED = -9
"""Status of a process that the kernel ended, as it does when memory is short."""

T = TypeVar("T", bound="Candidate")


@dataclass(slots=True)
class Candidate:
    """Candidate and its measurements.

    Attributes:
        settings: overrides that select it.
        problem: why it did not run; then there are no figures.
        seconds: of each timed step, or per 1,000 tokens where candidates compute different numbers of them.
        peak_bytes: device memory on CUDA, growth of the process on CPU.
        figures: further measurements, by the name of their column.
    """

    name: str
    settings: tuple[str, ...]
    problem: str | None = None
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def out_of_memory(self) -> bool:
        return self.problem is not None and self.problem.startswith(OUT_OF_MEMORY)

    def clearly_below(self, other: Candidate) -> bool:
        """Return whether it is faster beyond the noise: each median lies outside the other's range."""
        return self.median < min(other.seconds) and max(self.seconds) < other.median


Compose = Callable[[Sequence[str]], Config]
"""Composes the configuration of a run with further overrides, as the command line does. Raises UserError."""


def fastest(rows: Sequence[T]) -> T | None:
    """Return the candidate to choose: the fastest, or the first if none is faster beyond the noise.

    Returns:
        ``None``: none ran.
    """
    ran = [row for row in rows if row.problem is None]
    if not ran:
        return None
    best = min(ran, key=lambda row: row.median)
    first = rows[0]
    return first if first.problem is None and not best.clearly_below(first) else best


def describe_failure(error: Exception) -> str:
    """Return the problem of a candidate that raised ``error``: a line that begins with OUT_OF_MEMORY if it is that."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    short = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "t allocate memory" in first
    return f"{OUT_OF_MEMORY}: {first}" if short else f"{type(error).__name__}: {first}"


def run_trial(
    module: str, request: Mapping[str, Any], scratch: Path, environment: Mapping[str, str] | None = None
) -> tuple[Path, dict[str, Any]]:
    """Run ``python -m module FOLDER``, which reads ``request.json`` there and writes ``result.json``.

    Args:
        environment: further environment variables.

    Returns:
        The folder, and the result; ``{"problem": …}`` when the process ended without one.
    """
    folder = Path(tempfile.mkdtemp(dir=scratch))
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-m", module, str(folder)]
    variables = without_secrets(os.environ) | dict(environment or {})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, errors="replace", check=False)
    if (folder / "result.json").is_file():
        return folder, json.loads((folder / "result.json").read_text(encoding="utf-8"))
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == _KILLED:
        return folder, {"problem": f"{OUT_OF_MEMORY}, most likely: its process was killed"}
    return folder, {"problem": f"its process ended with status {done.returncode}: {last}"}
