"""Episode with a model behind an OpenAI-compatible endpoint: messages in, messages out, no token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_fleet.agents.builder import TrajectoryBuilder, timed
from megatron_fleet.agents.chat_client import Answer, ChatClient, ChatParams, PromptTooLong, Usage
from megatron_fleet.agents.chat_turn import ChatTurn, ToolNames, answers, read_turn, reminder
from megatron_fleet.agents.episode import Ending, play
from megatron_fleet.agents.history import ChatHistory
from megatron_fleet.agents.images import View, Viewer, view_all, view_images
from megatron_fleet.agents.settings import EpisodeSettings, stable_seed
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Environment
from megatron_fleet.models.chat.parser import ParsedTurn, ToolResult

SEED_BITS = 31
"""Size of a seed; servers differ in the largest one that they accept."""


async def run_chat_episode(
    task: Task,
    env: Environment,
    client: ChatClient,
    settings: EpisodeSettings,
    seed: int | None,
) -> Trajectory:
    """Play ``task`` once with an endpoint; see `episode.play`.

    The trajectory has no tokens (T = 0); its messages are the conversation. Token metrics are the endpoint's own
    counts, and absent if it does not report them: ``action_tokens`` (completions), ``prompt_tokens`` (all requests),
    ``think_tokens`` (reasoning), ``total_tokens`` (the last request and its answer).

    Args:
        seed: the episode's seed; each turn derives its own. ``None`` leaves sampling unseeded.

    Raises:
        CancelledError: after the environment was closed.
    """
    builder = TrajectoryBuilder()
    conversation = ChatConversation(client, settings, seed, builder)
    trajectory = await play(task, env, conversation, settings, builder)
    for name in ("action_tokens", "total_tokens", "segments"):
        trajectory.metrics.pop(name)
    trajectory.metrics |= conversation.tokens()
    return trajectory


class ChatConversation:
    """A `Conversation` in messages."""

    def __init__(
        self, client: ChatClient, settings: EpisodeSettings, seed: int | None, builder: TrajectoryBuilder
    ) -> None:
        self._client, self._settings, self._seed, self._builder = client, settings, seed, builder
        self._names = ToolNames(())
        self._usages: list[Usage] = []
        self._newest: ChatTurn
        self.history: ChatHistory
        self.trouble = ""
        unseen = settings.prompts.unseen
        self.viewer: Viewer = view_all if client.endpoint.images else partial(view_images, vision=None, sentence=unseen)

    async def begin(self, system: str, tools: tuple[dict[str, Any], ...], user: str, view: View) -> Ending | None:
        """See `Conversation`. The prompt's length is known only from the endpoint's answer."""
        self._names = ToolNames(tools)
        self.history = ChatHistory(system, user, view.images, self._settings.prompts.removed)
        return None

    async def turn(self, number: int, deadline: asyncio.Timeout) -> ParsedTurn | Ending:
        used = 0 if self.history.changed else self._used()
        if not self._settings.fits(used):
            return Ending(Outcome.CONTEXT_OVERFLOW)
        max_tokens = self._settings.turn_tokens(used)
        try:
            answer = await self._generate(number, max_tokens, deadline)
        except PromptTooLong as e:
            return Ending(Outcome.CONTEXT_OVERFLOW if self._builder.turns else Outcome.PROMPT_TOO_LONG, str(e))
        returned = self._client.endpoint.return_reasoning
        self._newest = read_turn(answer.message, number, returned, self._names)
        self._builder.say("assistant", self._newest.text)
        return self._beyond_limit(answer, max_tokens) or self._newest.parsed

    async def show(self, results: Sequence[ToolResult]) -> Ending | None:
        """See `Conversation`. The endpoint decides whether the results fit."""
        agent, said = self._settings.agent, self._newest
        note = f"[{self.status()}]" if agent.context_status else ""
        if results:
            self.history.add([said.message, *answers(said, results, note)])
        else:
            said_again = self._settings.prompts.reminder_text(agent.finish, bool(self._names.tools))
            text = "\n".join(filter(None, (said_again, note)))
            self._builder.say("user", text)
            self.history.add([said.message, reminder(text)])
        return None

    def status(self, tokens: int = 0) -> str:
        """See `Conversation`; uses the endpoint's token counts."""
        return self._settings.status(self._used() if self._usages else None, self._builder.turns)

    def tokens(self) -> dict[str, float]:
        """Return the endpoint's token counts; empty unless it reported them for every turn."""
        if not self._usages or len(self._usages) != self._builder.turns:
            return {}
        return {
            "action_tokens": sum(usage.completion for usage in self._usages),
            "prompt_tokens": sum(usage.prompt for usage in self._usages),
            "think_tokens": sum(usage.reasoning for usage in self._usages),
            "total_tokens": self._usages[-1].prompt + self._usages[-1].completion,
        }

    async def _generate(self, number: int, max_tokens: int, deadline: asyncio.Timeout) -> Answer:
        seed = None if self._seed is None else stable_seed(self._seed, number) >> (63 - SEED_BITS)
        params = ChatParams(self._settings.temperature, max_tokens, seed)
        failed = partial(self._failed, deadline)
        with timed(self._builder, "generate"):
            answer = await self._client.complete(self.history.messages(), self._names.tools, params, failed)
        self.trouble, self.history.changed = "", False
        self._builder.turns += 1
        if answer.usage is not None:
            self._usages.append(answer.usage)
        return answer

    def _failed(self, deadline: asyncio.Timeout, reason: str, seconds: float) -> None:
        """Record a failed attempt. It is not the policy's fault, so the deadline moves, to at most twice the limit."""
        self.trouble = reason
        self._builder.count("request_retries")
        limit, before = self._settings.episode_timeout_s, self._builder.metrics.get("endpoint_wait_s", 0.0)
        self._builder.count("endpoint_wait_s", seconds)
        due = deadline.when()
        if due is not None and not deadline.expired():
            deadline.reschedule(due + min(before + seconds, limit) - min(before, limit))

    def _beyond_limit(self, answer: Answer, max_tokens: int) -> Ending | None:
        """Return the ending if this turn exceeded a limit."""
        if self._usages and self._used() > self._settings.max_context:
            first = self._builder.turns == 1 and self._usages[-1].prompt >= self._settings.max_context
            return Ending(Outcome.PROMPT_TOO_LONG if first else Outcome.CONTEXT_OVERFLOW)
        return Ending(self._settings.truncated(max_tokens)) if answer.finish_reason == "length" else None

    def _used(self) -> int:
        """Return the context tokens used up to the newest turn, as far as known."""
        if not self._usages:
            return 0
        last = self._usages[-1]
        forgotten = 0 if self._client.endpoint.return_reasoning else last.reasoning
        return last.prompt + last.completion - forgotten
