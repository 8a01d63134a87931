"""Episode with an inference engine: token ids in, token ids out, so that training sees exactly what was sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_fleet.agents.builder import TrajectoryBuilder, timed
from megatron_fleet.agents.episode import Ending, play
from megatron_fleet.agents.history import Exchange, Thinking, TokenHistory
from megatron_fleet.agents.images import View, Viewer, view_images
from megatron_fleet.agents.settings import EpisodeSettings, stable_seed
from megatron_fleet.agents.token_engine import Engine, EngineLost, EngineRefused, Generation, SamplingParams
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Environment
from megatron_fleet.models.chat.parser import ParsedTurn, ToolResult
from megatron_fleet.models.chat.renderer import Renderer
from megatron_fleet.models.images import place

LONG_CHARS = 100_000
"""Texts longer than this are encoded in a thread."""


async def run_episode(
    task: Task,
    env: Environment,
    engine: Engine,
    renderer: Renderer,
    settings: EpisodeSettings,
    seed: int | None,
    session: str,
) -> Trajectory:
    """Play ``task`` once with ``engine``; see `episode.play`.

    Args:
        seed: the episode's seed; each turn derives its own. ``None`` leaves sampling unseeded.
        session: identifies the episode to the engine (see ``Engine.generate``).

    Raises:
        CancelledError: after the environment was closed.
    """
    builder = TrajectoryBuilder()
    conversation = TokenConversation(engine, renderer, settings, seed, session, builder)
    return await play(task, env, conversation, settings, builder)


class TokenConversation:
    """A `Conversation` in token ids: one growing sequence, replaced by a new one when the history is rewritten."""

    trouble = ""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        settings: EpisodeSettings,
        seed: int | None,
        session: str,
        builder: TrajectoryBuilder,
    ) -> None:
        self._engine, self._renderer, self._settings, self._builder = engine, renderer, settings, builder
        self._seed, self._session = seed, session
        self._thinking: Thinking
        self._tools: tuple[dict[str, Any], ...] = ()
        self._first_chars = 0  # length of the first prompt
        self._sampled: tuple[int, ...] = ()  # the newest turn
        self.history: TokenHistory
        vision = renderer.vision if settings.images else None
        self.viewer: Viewer = partial(view_images, vision=vision, sentence=settings.prompts.unseen)

    async def begin(self, system: str, tools: tuple[dict[str, Any], ...], user: str, view: View) -> Ending | None:
        step_wise, removed = self._settings.agent.step_wise, self._settings.prompts.removed
        self._tools = tools
        self._thinking = Thinking(self._renderer, tools)
        self.history = TokenHistory(self._renderer, system, tools, user, removed, step_wise, view.images)
        self._first_chars = len(system) + len(user) + len(json.dumps(tools))
        ids = await _encoded(self._first_chars, self.history.render)
        if not self._settings.fits(len(ids)):
            self._builder.count("first_prompt_tokens", len(ids))
            reason = f"the first prompt has {len(ids)} tokens and leaves no room in {self._settings.max_context}"
            return Ending(Outcome.PROMPT_TOO_LONG, reason)
        self._builder.begin(ids, place(ids, self.history.images(), self._renderer.vision))
        return None

    async def turn(self, number: int, deadline: asyncio.Timeout) -> ParsedTurn | Ending:
        max_tokens = self._settings.turn_tokens(len(self._builder.ids))
        generation = await self._generate(number, max_tokens)
        if generation.finish_reason == "abort":
            return Ending(Outcome.ABORTED, "the engine aborted the turn")
        if generation.finish_reason == "deadline":
            self._builder.count("turns_past_deadline", 1)
            return Ending(Outcome.GENERATION_TRUNCATED)
        if generation.finish_reason == "length":
            return Ending(self._settings.truncated(max_tokens))
        if np.isin(generation.token_ids, self._unspoken()).any():
            return Ending(Outcome.WROTE_IMAGE)
        return self._renderer.parse(self._builder.messages[-1]["content"], self._tools)

    async def show(self, results: Sequence[ToolResult]) -> Ending | None:
        prompts, agent = self._settings.prompts, self._settings.agent
        reminder = "" if results else prompts.reminder_text(agent.finish, bool(self._tools))
        exchange = Exchange(self._sampled, tuple(results), reminder)
        prompt = await self._prompt_after(exchange)
        if agent.context_status:
            exchange = exchange.with_note(f"[{self.status(len(prompt))}]")
            prompt = await self._prompt_after(exchange)
        if not self._settings.fits(len(prompt)):
            return Ending(Outcome.CONTEXT_OVERFLOW)
        if not results:
            self._builder.say("user", exchange.message)
        vision, known = self._renderer.vision, len(self._builder.ids)
        if self.history.changed:
            self._builder.begin(prompt, place(prompt, self.history.images(exchange), vision))
        else:
            shown = prompt[known:]
            self._builder.add_observation(shown, place(shown, exchange.images, vision, known))
        self.history.add(exchange)
        return None

    def status(self, tokens: int) -> str:
        return self._settings.status(tokens, self._builder.turns)

    async def _generate(self, number: int, max_tokens: int) -> Generation:
        seed = None if self._seed is None else stable_seed(self._seed, number)
        routing_start = self._builder.routed if self._settings.routing else None
        stop = (*self._renderer.stop_token_ids, *self._unspoken())
        params = SamplingParams(self._settings.temperature, max_tokens, stop, seed, routing_start)
        with timed(self._builder, "generate"):
            try:
                generation = await self._engine.generate(self._builder.ids, params, self._session, self._builder.images)
            except EngineLost as e:
                raise EngineLost(f"engine lost: {e}") from e
            except EngineRefused as e:
                raise EngineRefused(f"the engine refuses the request: {e}") from e
        self._builder.add_action(generation)
        sampled = generation.token_ids.tolist()
        self._sampled = tuple(sampled)
        self._builder.count("think_tokens", self._thinking.count(sampled))
        self._builder.say("assistant", self._renderer.text(sampled))
        return generation

    async def _prompt_after(self, exchange: Exchange) -> list[int]:
        chars = sum(len(result.text) for result in exchange.results)
        if self.history.changed:
            return await _encoded(self._first_chars + chars, lambda: self.history.render(exchange))
        last_id = self._builder.ids[-1]
        return self._builder.ids + await _encoded(chars, lambda: exchange.answer(self._renderer, last_id))

    def _unspoken(self) -> tuple[int, ...]:
        return self._renderer.vision.unspoken_ids if self._renderer.vision else ()


async def _encoded(chars: int, encode: Callable[[], list[int]]) -> list[int]:
    """Return what ``encode`` makes of ``chars`` characters, in a thread if they are many.

    Encoding takes a second per MB or more, and would stop every other episode of the worker.
    """
    return await asyncio.to_thread(encode) if chars > LONG_CHARS else encode()
