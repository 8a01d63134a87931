"""Scripted engine and environment for unit tests of the loop; the real ones have tests of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from waiting import HANG_S

from megatron_fleet.agents.prompts import load_prompts
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.config.schema import AgentConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Observation, Reward, ToolCall
from megatron_fleet.models.chat.tokenizer import Tokenizer

TASK = Task(
    key="t-1",
    prompt="Count the tickets.",
    env_key="desk",
    verifier_code="",
    env_variables={"CURRENT_DATE": "2025-03-01"},
)
TOOLS = ({"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}},)
PROMPTS = load_prompts(None)
SETTINGS = EpisodeSettings(
    max_context=4000,
    max_tokens_per_turn=200,
    max_turns=6,
    max_no_action_turns=2,
    temperature=0.8,
    episode_timeout_s=HANG_S,
    verify_timeout_s=HANG_S,
    close_timeout_s=HANG_S,
    agent=AgentConfig(max_tool_output_chars=500),
    prompts=PROMPTS,
)
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "open"}}\n</tool_call>'


@dataclass
class Turn:
    """One scripted generation; ``versions`` are (version, share of the tokens) pairs."""

    text: str
    finish_reason: str = "stop"
    versions: tuple[tuple[int, float], ...] = ((7, 1.0),)
    stop_token: str = "<|im_end|>"


def use(name: str, arguments: str) -> Turn:
    """A turn that calls one tool with arguments in JSON."""
    return Turn(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')


@dataclass
class ScriptedEngine:
    """Answers with ``script`` in order; an exception in the script is raised, a number of seconds is slept."""

    tokenizer: Tokenizer
    script: list[Turn | Exception | float]
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    async def generate(self, prompt_ids, params: SamplingParams, session: str, images=()) -> Generation:
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        self.sessions.append(session)
        step = self.script.pop(0)
        if isinstance(step, float):
            await asyncio.sleep(step)
            step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        ids = self.tokenizer.encode(step.text)
        if step.finish_reason == "stop":
            ids.append(self.tokenizer.special[step.stop_token])
        elif step.finish_reason == "length":
            ids = ids[: params.max_tokens]
        edges = [round(len(ids) * sum(s for _, s in step.versions[:i])) for i in range(len(step.versions) + 1)]
        versions = tuple((v, a, b) for (v, _), a, b in zip(step.versions, edges, edges[1:], strict=False))
        start = sum(len(g.token_ids) for g in self.generations)
        logprobs = -np.arange(start + 1, start + 1 + len(ids), dtype=np.float32)
        generation = Generation(np.array(ids, np.int32), logprobs, step.finish_reason, versions)
        self.generations.append(generation)
        return generation


@dataclass
class ScriptedEnvironment:
    """Each verb returns or raises its next scripted item; a coroutine function is awaited first."""

    reset_script: list[Any] = field(default_factory=lambda: [Observation(TASK.prompt, TOOLS)])
    step_script: list[Any] = field(default_factory=list)
    verify_script: list[Any] = field(default_factory=lambda: [Reward(1.0, "all checks passed")])
    close_action: Callable[[], Awaitable[None]] | None = None
    calls: list[ToolCall] = field(default_factory=list)
    verified: list[tuple[str | None, list[dict[str, Any]]]] = field(default_factory=list)
    closed: int = 0

    async def reset(self, task: Task) -> Observation:
        return await _next(self.reset_script)

    async def step(self, call: ToolCall) -> Observation:
        self.calls.append(call)
        return await _next(self.step_script)

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        self.verified.append((final_answer, list(conversation)))
        return await _next(self.verify_script)

    async def close(self) -> None:
        if self.close_action:
            await self.close_action()
        self.closed += 1


async def _next(script: list[Any]) -> Any:
    item = script.pop(0)
    if callable(item):
        item = await item()
    if isinstance(item, Exception):
        raise item
    return item


async def forever() -> None:
    """Waits until it is cancelled."""
    await asyncio.Event().wait()
