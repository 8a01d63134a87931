"""The processes of ``env_concurrency.py``: the environment server, and the worker with a stub policy. JSON lines."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from roles import Handler, bench_tasks, play_role

from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.config.schema import Config
from megatron_fleet.embedded_fleet.server import serve
from megatron_fleet.embedded_fleet.solver import Demonstration, demonstrate
from megatron_fleet.envs.base import ToolCall
from megatron_fleet.envs.openenv_client import import_openenv
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.models.qwen3.chat import IM_END
from megatron_fleet.rollout.policy import EngineAccess
from megatron_fleet.rollout.requests import EpisodeSpec
from megatron_fleet.rollout.worker import EpisodeWorker, LoopLag

FINISH_TOOL = "submit_final_answer"
PATIENCE_S = 300.0


def resources() -> dict[str, float]:
    """Memory of this process; ``children`` counts all generations."""
    gc.collect()
    own = Path("/proc/self")
    return {
        "rss_mib": int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": threading.active_count(),
        "fds": len(list((own / "fd").iterdir())),
        "tasks": len(asyncio.all_tasks()),
        "sqlite": sum(isinstance(o, sqlite3.Connection) for o in gc.get_objects()),
        "children": len(_descendants(os.getpid())),
    }


def _descendants(pid: int) -> list[int]:
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:  # it ended while being looked at
        return []
    return children + [grandchild for child in children for grandchild in _descendants(child)]


class Meter:
    """Resources, and the loop's lag since it was last asked for."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._lag = LoopLag()
        self._watching = self._lag.watching()
        self._watching.__enter__()

    async def lag(self) -> dict[str, Any]:
        found = {f"p{round(q * 100)}_ms": 1e3 * self._lag.quantile(q) for q in (0.5, 0.99)}
        self._watching.__exit__(None, None, None)
        self._begin()
        return found

    async def resources(self) -> dict[str, Any]:
        return resources()


async def server(settings: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> dict[str, Handler]:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        serving = asyncio.create_task(serve(0, ready))
        while not ready.exists():
            if serving.done():
                serving.result()
            await asyncio.sleep(0.02)
        port = json.loads(ready.read_text())["port"]
    meter = Meter()

    async def close() -> None:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    answer({"url": f"http://127.0.0.1:{port}"})
    return {"lag": meter.lag, "resources": meter.resources, "close": close}


class StubEngine:
    """Says the scripted solver's turns, at once. The first turns of a round wait for each other."""

    def __init__(self, scripts: dict[str, list[np.ndarray]]) -> None:
        self._scripts = scripts
        self._turns: dict[str, int] = {}
        self._everyone: asyncio.Barrier | None = None

    def begin(self, episodes: int) -> None:
        self._everyone = asyncio.Barrier(episodes)
        self.full_at: float | None = None

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        turn = self._turns.pop(session, 0)
        said = self._scripts[session.split("/", 5)[5]]
        if turn == 0 and self._everyone is not None:
            await self._everyone.wait()
            self.full_at = self.full_at or time.perf_counter()
        if turn + 1 < len(said):
            self._turns[session] = turn + 1
        ids = said[turn]
        return Generation(ids, np.zeros(len(ids), np.float32), "stop", ((0, 0, len(ids)),))


def _script(demonstration: Demonstration, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Token ids of the solver's turns, int32."""
    texts = []
    for turn, _ in demonstration.turns:
        if isinstance(turn, ToolCall):
            call = json.dumps({"name": turn.name, "arguments": turn.arguments})
            texts.append(f"<tool_call>\n{call}\n</tool_call>")
        else:
            texts.append(f"{turn.text} <done>")
    return [np.array([*tokenizer.encode(text), tokenizer.special[IM_END]], np.int32) for text in texts]


async def bare_episode(url: str, demonstration: Demonstration, everyone: asyncio.Barrier) -> int:
    """The same messages through OpenEnv's client alone; returns the number of tool calls."""
    from openenv.core.generic_client import GenericEnvClient

    task = demonstration.task
    client = GenericEnvClient(base_url=url, connect_timeout_s=PATIENCE_S, message_timeout_s=PATIENCE_S)
    calls = [turn for turn, _ in demonstration.turns if isinstance(turn, ToolCall)]
    try:
        await client.reset(
            task_key=task.key,
            prompt=task.prompt,
            env_key=task.env_key,
            data_key=task.data_key,
            env_variables=task.env_variables,
            verifier_code=task.verifier_code,
        )
        await client.step({"type": "list_tools"})
        await everyone.wait()
        for call in calls:
            await client.step({"type": "call_tool", "tool_name": call.name, "arguments": call.arguments})
        finish = {"type": "call_tool", "tool_name": FINISH_TOOL, "arguments": {"answer": demonstration.answer}}
        if (await client.step(finish)).reward != 1.0:
            raise RuntimeError(f"task {task.key} was not solved")
    finally:
        await client.close()
    return len(calls)


async def worker(settings: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> dict[str, Handler]:
    config = Config.model_validate(settings["config"])
    sections = (config.rollout.model_dump(), config.env.model_dump(), config.agent.model_dump())
    access = EngineAccess(config.model.path, ["127.0.0.1:1"], "unused")
    player = EpisodeWorker(access, *sections, settings["url"])
    tasks = bench_tasks()
    solved = [demonstrate(task) for task in tasks]
    tokenizer = Tokenizer(config.model.path)
    engine = StubEngine({demonstration.task.key: _script(demonstration, tokenizer) for demonstration in solved})
    player.policy._engine = engine
    meter = Meter()
    import_openenv()
    rounds = 0

    async def play(episodes: int) -> dict[str, Any]:
        nonlocal rounds
        rounds += 1
        engine.begin(episodes)
        specs = [EpisodeSpec(tasks[i % len(tasks)], i, 0, rounds, 1.0) for i in range(episodes)]
        began, cpu = time.perf_counter(), time.process_time()
        trajectories = await player.run(specs)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        ends = {(str(t.outcome), t.reward) for t in trajectories}
        if ends != {("completed", 1.0)}:
            reasons = sorted({t.reward_reason for t in trajectories})
            raise RuntimeError(f"scripted episodes must succeed: {ends}, {reasons[:3]}")
        calls = int(sum(t.metrics["tool_calls"] for t in trajectories))
        assert engine.full_at is not None  # every episode passed the barrier
        return {"seconds": seconds, "start_s": engine.full_at - began, "tool_calls": calls, "cpu_seconds": cpu}

    async def bare(episodes: int) -> dict[str, Any]:
        everyone = asyncio.Barrier(episodes)
        began, cpu = time.perf_counter(), time.process_time()
        played = [bare_episode(settings["url"], solved[i % len(solved)], everyone) for i in range(episodes)]
        calls = sum(await asyncio.gather(*played))
        return {
            "seconds": time.perf_counter() - began,
            "tool_calls": calls,
            "cpu_seconds": time.process_time() - cpu,
        }

    async def close() -> None:
        return None

    answer({})
    return {"play": play, "bare": bare, "lag": meter.lag, "resources": meter.resources, "close": close}


if __name__ == "__main__":
    play_role({"server": server, "worker": worker})
