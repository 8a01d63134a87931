"""Play the first step of an episode: ``python -m megatron_fleet.envs.first_step`` in the episode environment.

For `mfleet doctor`. Reads the section ``env``, the run's seed and tasks from standard input; the last line of the
output tells what each task's environment answered, or the ``problem``.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.env import EnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, EnvLost, Observation, ToolCall
from megatron_fleet.envs.registry import ServerStart, make_environment, serve

AT_ONCE = 4
"""Environments that are started at the same time."""
UNREACHABLE = ("timeout", "transport_error")
"""Kinds of tool errors that are the environment's fault, not the call's."""


async def play(config: EnvConfig, task: Task, url: str, token: str) -> dict[str, Any]:
    """Reset one environment to the task and call the tool with the fewest required arguments, with none.

    Raises:
        EnvBusy, EnvLost: the environment does not start, or is gone.
    """
    environment = make_environment(config, url, "doctor", token)
    try:
        observation = await environment.reset(task)
        tools = [tool["function"] for tool in observation.tools]
        chosen = min(tools, key=lambda tool: len(tool.get("parameters", {}).get("required", ())), default=None)
        found: dict[str, Any] = {"tools": len(tools), "tool": None, "answer": "was offered", "works": not tools}
        if chosen is not None:
            answer = await environment.step(ToolCall(chosen["name"], {}))
            works = answer.error is None or answer.error.kind not in UNREACHABLE
            found |= {"tool": chosen["name"], "answer": _said(answer), "works": works}
        return found
    finally:
        await environment.close()


def _said(answer: Observation) -> str:
    if answer.error is None:
        return f"answered with {len(answer.content)} characters"
    return f"answered {answer.error.kind}: {answer.error.message[:200]}"


async def play_all(config: EnvConfig, tasks: Sequence[Task], url: str, token: str) -> list[dict[str, Any]]:
    """`play` each task: what it found, and its ``seconds``, or the ``problem``; with the ``environment`` of each."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(task: Task) -> dict[str, Any]:
        async with places:
            begun, there = time.monotonic(), {"environment": task.env_key, "task": task.key}
            try:
                return there | await play(config, task, url, token) | {"seconds": time.monotonic() - begun}
            except (EnvBusy, EnvLost) as error:
                return there | {"problem": f"does not start ({error})"}

    return await asyncio.gather(*map(one, tasks))


def main() -> int:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.read())
    config, token = EnvConfig.model_validate(request["env"]), secrets.token_hex(16)
    tasks = [Task(**values) for values in request["tasks"]]
    answer: dict[str, Any]
    with tempfile.TemporaryDirectory(prefix="mfleet-doctor-") as folder:
        try:
            server = serve(
                ServerStart(config, Path(folder, "server.log"), sys.executable, request["seed"], token=token)
            )
            try:
                answer = {"environments": asyncio.run(play_all(config, tasks, server.url, token))}
            finally:
                server.stop()
        except UserError as error:
            answer = {"problem": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
