"""Benchmarks of several processes: each takes commands and answers, one JSON line each."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.data.task import Task
from megatron_fleet.embedded_fleet.tasks import SHIPPED_TASKS

Handler = Callable[..., Awaitable[dict[str, Any]]]
Answer = Callable[[dict[str, Any]], None]
Start = Callable[[dict[str, Any], Answer], Awaitable[dict[str, Handler]]]
"""Starts a role from its settings, answers once when it is up, and returns its commands, ``close`` among them."""


class Role:
    """The side that commands.

    Attributes:
        started: the role's first answer.
    """

    def __init__(
        self, script: Path, python: Path, role: str, settings: dict[str, Any], variables: dict[str, str]
    ) -> None:
        command = [str(python), str(script), role, json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables
        )
        self.pid = self._process.pid
        self.started = self._answer()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"command": command} | arguments) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def children_cpu_seconds(self) -> float:
        return sum(cpu_seconds(pid) for pid in children(self.pid))

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process {self._process.args[2]} of the benchmark ended")
        return json.loads(line)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process, 0 when it is gone."""
    import psutil  # the episode environment, where some roles play, has none

    try:
        return sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.NoSuchProcess:
        return 0.0


def children(pid: int) -> list[int]:
    """Pids of everything below a process."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def bench_tasks() -> list[Task]:
    """Every fifth task: all environments and kinds."""
    return load_tasks(SHIPPED_TASKS)[::5]


def play_role(starts: Mapping[str, Start]) -> None:
    """The side that is commanded: plays the role that the command line names, until its input ends."""
    parser = argparse.ArgumentParser(description="A process of a benchmark, which starts it. Takes commands as JSON.")
    parser.add_argument("role", choices=starts)
    parser.add_argument("settings", type=json.loads, help="JSON")
    given = parser.parse_args()
    asyncio.run(_serve(starts[given.role], given.settings, os.dup(1)))


async def _serve(start: Start, settings: dict[str, Any], stdout: int) -> None:
    os.dup2(2, 1)  # only answers go to the real stdout

    def answer(message: dict[str, Any]) -> None:
        os.write(stdout, json.dumps(message).encode() + b"\n")

    handlers = await start(settings, answer)
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as reader:  # not the loop's own pool, whose threads a role may count
        while line := await loop.run_in_executor(reader, sys.stdin.readline):
            command = json.loads(line)
            answer(await handlers[command.pop("command")](**command))
        await handlers["close"]()
