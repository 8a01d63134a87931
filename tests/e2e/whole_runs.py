"""Start `mfleet train` as a user would, small enough for a test, and look at what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from planted import PLANTED, watched
from waiting import wait_until

from megatron_fleet.telemetry.shards import Shard

SMALL = (
    "run.steps=3",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "eval.tasks=3",
    "eval.samples=2",
    "checkpoint.interval=1",
    "policy.threads=1",
)
RUN_TIMEOUT_S = 1800
CLOCK_METRICS = (
    "time", "attempt", "checkpoint/",
    "timing/", "memory/", "engine/", "generate/tokens_per_second", "generate/uploads_failed", "async/trainer_waits",
    "async/engines_idle", "tokens/", "cost/",
)  # fmt: skip


@dataclass
class Run:
    """One `mfleet train` process. ``mark`` is in the environment of everything it starts, ``environ`` in its own;
    ``held`` says what secrets the processes of a watched run held, see `planted.watched`."""

    out: Path
    overrides: tuple[str, ...] = ()
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    held: dict[str, set[str]] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """Begin of the command line; the arguments of `mfleet` follow."""
        return [sys.executable, "-m", "megatron_fleet.cli"]

    def start(self) -> subprocess.Popen[str]:
        arguments = ("train", "experiment=quickstart", "--out", str(self.out), *SMALL, *self.overrides)
        return subprocess.Popen(
            [*self.command(), *arguments],
            env={**os.environ, "MFLEET_TEST_MARK": self.mark, **PLANTED, **self.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *, watch: bool = False) -> str:
        """Run to the end, and ``watch`` its processes for secrets; returns the terminal output."""
        process = self.start()
        with watched(process) if watch else nullcontext({}) as self.held:
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        assert process.returncode == 0, output[-3000:] + self.logs()
        return output

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    def facts(self) -> list[dict[str, Any]]:
        """The metrics that depend on neither clock nor process."""
        return [{k: v for k, v in row.items() if not k.startswith(CLOCK_METRICS)} for row in self.metrics()]

    def arrays(self, name: str) -> list[dict[str, np.ndarray]]:
        """Token ids, action mask and behaviour log-probs of each trajectory of a file such as ``step_000001``."""
        data = Shard.open(self.out / "trajectories" / f"{name}.parquet").arrays()
        edges = data.pop("offsets")
        return [{n: values[a:b] for n, values in data.items()} for a, b in pairwise(edges)]

    def logs(self) -> str:
        found = [self.out / "error.log", *sorted((self.out / "logs").glob("*.log"))]
        return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in found if p.exists())

    def processes(self) -> list[str]:
        """Command lines of the living processes that this run started."""
        alive = []
        for folder in Path("/proc").iterdir():
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                    alive += [] if state == "Z" else [f"{folder.name} {command}"]
            except (OSError, ValueError):
                continue
        return alive

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.processes())


def wait_for(awaited: Path | Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until a file exists, or something is true; fails when the process ends before."""
    there = awaited.exists if isinstance(awaited, Path) else awaited
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not there():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, f"{awaited} did not appear"
        time.sleep(0.1)
