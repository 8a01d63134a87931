"""One episode: an async procedure that plays a Task and leaves a Trajectory."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from megatron_fleet.agents import ending
from megatron_fleet.agents.builder import TrajectoryBuilder, timed
from megatron_fleet.agents.ending import Ending
from megatron_fleet.agents.engine import Engine, EngineLost, Generation, SamplingParams
from megatron_fleet.agents.history import Exchange, History
from megatron_fleet.agents.images import place
from megatron_fleet.agents.local_tools import LocalTools, offered
from megatron_fleet.agents.outputs import ToolOutputs
from megatron_fleet.agents.parser import ParsedTurn
from megatron_fleet.agents.renderer import Renderer, ToolResult
from megatron_fleet.agents.settings import EpisodeSettings, stable_seed
from megatron_fleet.agents.sight import see
from megatron_fleet.agents.thinking import Thinking
from megatron_fleet.agents.toolbox import Toolbox, reset
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Environment, EnvLost, Observation

MIN_TURN_TOKENS = 16
"""A turn starts only if this many tokens (or a whole turn, when that is shorter) still fit into the context."""

MAX_CHARS_PER_TOKEN = 16
"""A first prompt with more characters for each token of the context is too long, without a look at its tokens."""


async def run_episode(
    task: Task,
    group: int,
    sample: int,
    env: Environment,
    engine: Engine,
    renderer: Renderer,
    settings: EpisodeSettings,
    seed: int | None,
    session: str,
) -> Trajectory:
    """Play ``task`` once: reset, then turns until something ends the episode, verify, close.

    Whatever the policy, the environment and the engine do within their protocols ends in a Trajectory. Playing and
    verifying have deadlines of their own, so that an episode that ran out of time can still be scored. The
    environment is closed in every case, cancellation included.

    Args:
        seed: of this episode; each turn derives its own. ``None`` leaves sampling unseeded.
        session: names the episode to the engine (see ``Engine.generate``).

    Raises:
        CancelledError: after the environment was closed.
    """
    began = time.perf_counter()
    builder = TrajectoryBuilder()
    try:
        end = await _Play(task, env, engine, renderer, settings, seed, session, builder).until_deadline()
        with timed(builder, "verify_s"):
            end, reward = await ending.score(end, env, builder.messages, settings.verify_timeout_s)
    finally:
        await ending.close(env, settings.close_timeout_s)
    builder.metrics["seconds"] = time.perf_counter() - began
    return builder.build(task, group, sample, end.outcome, reward, end.reason, end.final_answer)


@dataclass(slots=True)
class _Play:
    """The turns of one episode."""

    task: Task
    env: Environment
    engine: Engine
    renderer: Renderer
    settings: EpisodeSettings
    seed: int | None
    session: str
    builder: TrajectoryBuilder
    history: History = field(init=False)
    local: LocalTools = field(init=False)
    toolbox: Toolbox = field(init=False)
    thinking: Thinking = field(init=False)
    tools: tuple[dict[str, Any], ...] = ()

    async def until_deadline(self) -> Ending:
        limit = self.settings.episode_timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._episode()
        except TimeoutError:
            if not deadline.expired():
                raise
            if not self.builder.messages:
                return Ending(Outcome.ENV_FAILED, f"the environment did not start within {limit:g} s")
            return Ending(Outcome.TIMEOUT, f"the episode did not end within {limit:g} s")
        except EnvLost as e:
            return Ending(Outcome.ENV_FAILED, f"environment lost: {e}")
        except EngineLost as e:
            return Ending(Outcome.ABORTED, f"engine lost: {e}")

    async def _episode(self) -> Ending:
        with timed(self.builder, "env_s"):
            first = await reset(self.env, self.task)
        if not await self._begin(first):
            return Ending(Outcome.PROMPT_TOO_LONG, f"the first prompt leaves no room in {self.settings.max_context}")
        turns_without_call = 0
        for turn in range(self.settings.max_turns):
            max_tokens = min(self.settings.max_tokens_per_turn, self.settings.max_context - len(self.builder.ids))
            generation = await self._generate(turn, max_tokens)
            if generation.finish_reason == "abort":
                return Ending(Outcome.ABORTED, "the engine aborted the turn")
            if generation.finish_reason == "deadline":
                self.builder.count("turns_past_deadline", 1)
                return Ending(Outcome.GENERATION_TRUNCATED)
            if generation.finish_reason == "length":
                shrunk = max_tokens < self.settings.max_tokens_per_turn
                return Ending(Outcome.CONTEXT_OVERFLOW if shrunk else Outcome.GENERATION_TRUNCATED)
            if np.isin(generation.token_ids, self._unspoken()).any():
                return Ending(Outcome.WROTE_IMAGE)
            parsed = self.renderer.parse(self.builder.messages[-1]["content"], self.tools)
            if (answer := self._final_answer(parsed)) is not None:
                return Ending(Outcome.COMPLETED, final_answer=answer)
            results, env_done = await self.toolbox.act(parsed)
            if env_done:
                return Ending(Outcome.COMPLETED)
            turns_without_call = 0 if parsed.tool_calls else turns_without_call + 1
            if turns_without_call == self.settings.max_no_action_turns:
                return Ending(Outcome.NO_ACTION)
            if turn + 1 < self.settings.max_turns and not self._show(generation, results):
                return Ending(Outcome.CONTEXT_OVERFLOW)
        return Ending(Outcome.MAX_TURNS)

    async def _begin(self, first: Observation) -> bool:
        """Lay down the first prompt; false, and no tokens, when it does not fit."""
        agent, prompts = self.settings.agent, self.settings.prompts
        system = prompts.system_text(self.task.env_key, agent.finish)
        vision = self.renderer.vision if self.settings.pictures else None
        look = partial(see, vision=vision, sentence=prompts.unseen)
        seen = await look(first.content, first.images)
        if seen.unseen:
            self.builder.count("images_unseen", seen.unseen)
        user = prompts.user_text(self.task, seen.text)
        own = offered(agent)
        names = {tool["function"]["name"] for tool in own}
        self.tools = (*(tool for tool in first.tools if tool["function"]["name"] not in names), *own)
        self.thinking = Thinking(self.renderer)
        outputs = ToolOutputs(agent.max_tool_output_chars, agent.paging)
        self.history = History(self.renderer, system, self.tools, user, prompts.removed, agent.step_wise, seen.images)
        self.local = LocalTools(agent, outputs, self.history, self.builder, self._status)
        self.toolbox = Toolbox(self.env, self.settings, self.builder, outputs, self.local, look)
        self.builder.say("system", system)
        self.builder.say("user", user, seen.images)
        # Encoding takes seconds for each MB, during which no other episode of the worker goes on.
        if len(system) + len(user) + len(json.dumps(self.tools)) > MAX_CHARS_PER_TOKEN * self.settings.max_context:
            return False
        ids = self.history.render()
        if not self._fits(ids):
            return False
        self.builder.begin(ids, place(ids, self.history.images(), self.renderer.vision))
        return True

    async def _generate(self, turn: int, max_tokens: int) -> Generation:
        seed = None if self.seed is None else stable_seed(self.seed, turn)
        routing_start = self.builder.routed if self.settings.routing else None
        stop = (*self.renderer.stop_token_ids, *self._unspoken())
        params = SamplingParams(self.settings.temperature, max_tokens, stop, seed, routing_start)
        with timed(self.builder, "generate_s"):
            generation = await self.engine.generate(self.builder.ids, params, self.session, self.builder.images)
        self.builder.add_action(generation)
        sampled = generation.token_ids.tolist()
        self.builder.count("think_tokens", self.thinking.count(sampled))
        self.builder.say("assistant", self.renderer.text(sampled))
        return generation

    def _final_answer(self, parsed: ParsedTurn) -> str | None:
        if self.settings.agent.finish == "done_tag":
            return parsed.final_answer
        return None if parsed.errors else self.local.final_answer(parsed.tool_calls)

    def _show(self, generation: Generation, results: list[ToolResult]) -> bool:
        """Show the results, or a reminder when there are none; false, and no tokens, when they do not fit."""
        reminder = "" if results else self.settings.prompts.reminder_text(self.settings.agent.finish)
        exchange = Exchange(tuple(generation.token_ids.tolist()), tuple(results), reminder)
        prompt = self._prompt_after(exchange)
        if self.settings.agent.context_status:
            exchange = exchange.with_note(f"[{self._status(len(prompt))}]")
            prompt = self._prompt_after(exchange)
        if not self._fits(prompt):
            return False
        if not results:
            self.builder.say("user", exchange.message)
        vision, known = self.renderer.vision, len(self.builder.ids)
        if self.history.changed:
            self.builder.begin(prompt, place(prompt, self.history.images(exchange), vision))
        else:
            shown = prompt[known:]
            self.builder.add_observation(shown, place(shown, exchange.images, vision, known))
        self.history.add(exchange)
        return True

    def _prompt_after(self, exchange: Exchange) -> list[int]:
        if self.history.changed:
            return self.history.render(exchange)
        return self.builder.ids + exchange.answer(self.renderer, self.builder.ids[-1])

    def _unspoken(self) -> tuple[int, ...]:
        return self.renderer.vision.unspoken_ids if self.renderer.vision else ()

    def _status(self, tokens: int) -> str:
        limit, turns = self.settings.max_context, self.settings.max_turns
        return f"Context: {tokens}/{limit} tokens, turn {self.builder.turns}/{turns}"

    def _fits(self, prompt: list[int]) -> bool:
        room = self.settings.max_context - len(prompt)
        return room >= min(MIN_TURN_TOKENS, self.settings.max_tokens_per_turn)
