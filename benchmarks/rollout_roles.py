"""The processes of ``rollout.py``: the engine with a scripted tongue, and the worker. They are told by JSON lines."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from roles import Handler, bench_tasks, play_role

from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.config.schema import Config
from megatron_fleet.data.task import Task
from megatron_fleet.embedded_fleet.solver import demonstrate
from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.models.qwen3.chat import IM_END
from megatron_fleet.rollout.engine_actor import EngineActor

TOKEN = "benchmark"
WAITS = ("env_s", "generate_s", "verify_s")
"""Metrics of an episode: how long it waited for whom."""


class ScriptedEngine(EngineActor):
    """Samples as many tokens as the script's next turn has, and says the script's."""

    def __init__(self, config: Config, log: Path) -> None:
        super().__init__(config, TOKEN, log, "shm")
        tokenizer = Tokenizer(config.model.path)
        self._scripts = {task.key: _script(task, tokenizer) for task in bench_tasks()}
        self._asked: dict[str, list[tuple[list[int], SamplingParams]]] = defaultdict(list)

    async def _generate(
        self, prompt: list[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> Generation:
        requests = self._asked[session]
        said = self._scripts[session.split("/", 5)[5]][len(requests)]
        request = (prompt, dataclasses.replace(params, max_tokens=len(said), stop_token_ids=()))
        requests.append(request)
        sampled = await super()._generate(*request, session, images)
        return dataclasses.replace(sampled, token_ids=np.array(said, np.int32), finish_reason="stop")

    async def forget(self) -> dict[str, Any]:
        """Start over: no cached prefix. The recorded requests stay until the next first turn."""
        await self._llm.reset_prefix_cache()
        self._recorded = list(self._asked.values())
        self._asked = defaultdict(list)
        return {}

    async def replay(self, concurrency: int) -> dict[str, Any]:
        """The recorded requests straight into vLLM, one episode's after the other, ``concurrency`` episodes at once."""
        room = asyncio.Semaphore(concurrency)
        tokens = 0

        async def episode(requests: list[tuple[list[int], SamplingParams]]) -> None:
            nonlocal tokens
            async with room:
                for prompt, params in requests:
                    await EngineActor._generate(self, prompt, params, "", ())
                    tokens += params.max_tokens

        started = time.perf_counter()
        await asyncio.gather(*(episode(requests) for requests in self._recorded))
        return {"seconds": time.perf_counter() - started, "tokens": tokens}


def _script(task: Task, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of the solver's turns."""
    texts = []
    for turn, _ in demonstrate(task).turns:
        if isinstance(turn, ToolCall):
            call = json.dumps({"name": turn.name, "arguments": turn.arguments})
            texts.append(f"<tool_call>\n{call}\n</tool_call>")
        else:
            texts.append(f"{turn.text} <done>")
    return [[*tokenizer.encode(text), tokenizer.special[IM_END]] for text in texts]


async def engine(settings: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> dict[str, Handler]:
    actor = ScriptedEngine(Config.model_validate(settings["config"]), Path(settings["log"]))
    endpoint = await actor.listen("127.0.0.1")
    await actor.start()
    await actor.serve()
    answer({"endpoint": endpoint})
    return {"forget": actor.forget, "replay": actor.replay, "close": actor.shutdown}


async def worker(settings: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> dict[str, Handler]:
    from megatron_fleet.envs.registry import make_environment
    from megatron_fleet.rollout.policy import EngineAccess
    from megatron_fleet.rollout.requests import EpisodeSpec
    from megatron_fleet.rollout.worker import EpisodeWorker

    config = Config.model_validate(settings["config"])
    sections = (config.rollout.model_dump(), config.env.model_dump(), config.agent.model_dump())
    access = EngineAccess(config.model.path, [settings["endpoint"]], TOKEN)
    player = EpisodeWorker(access, *sections, settings["url"])
    tasks = bench_tasks()

    async def play(episodes: int) -> dict[str, Any]:
        specs = [EpisodeSpec(tasks[i % len(tasks)], i, 0, 0, 1.0) for i in range(episodes)]
        started = time.perf_counter()
        trajectories = await asyncio.gather(*(player.play(spec) for spec in specs))
        seconds = time.perf_counter() - started
        outcomes = {str(t.outcome) for t in trajectories}
        rewards = {t.reward for t in trajectories}
        if (outcomes, rewards) != ({"completed"}, {1.0}):
            raise RuntimeError(
                f"scripted episodes must succeed: {outcomes}, {rewards}, {trajectories[0].reward_reason}"
            )
        actions = [span for t in trajectories for span in t.spans if span.kind == "action"]
        means = {k: float(np.mean([t.metrics.get(k, 0.0) for t in trajectories])) for k in WAITS}
        tokens = sum(span.end - span.start for span in actions)
        return {"seconds": seconds, "turns": len(actions), "tokens": tokens, "waits": means}

    async def client(episodes: int) -> dict[str, Any]:
        """Reset, scripted calls and verify, through the same adapter, without engine or agent loop."""
        scripts = [(tasks[i % len(tasks)], demonstrate(tasks[i % len(tasks)])) for i in range(episodes)]

        async def episode(task: Task, turns: list[ToolCall], final_answer: str) -> None:
            environment = make_environment(config.env, settings["url"])
            await environment.reset(task)
            for turn in turns:
                await environment.step(turn)
            await environment.verify(final_answer, [])
            await environment.close()

        cpu = time.process_time()
        await asyncio.gather(
            *(episode(t, [c for c, _ in d.turns if isinstance(c, ToolCall)], d.answer) for t, d in scripts)
        )
        return {"cpu_seconds": time.process_time() - cpu}

    async def close() -> None:
        return None

    answer({})
    return {"play": play, "client": client, "close": close}


if __name__ == "__main__":
    play_role({"engine": engine, "worker": worker})
