"""One episode: an async procedure that plays a Task and returns a Trajectory, independent of how the policy is reached.

`token_conversation` talks to an engine in token ids, `chat_conversation` to an OpenAI-compatible endpoint in messages.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fleet.agents import ending
from megatron_fleet.agents.builder import TrajectoryBuilder, timed
from megatron_fleet.agents.ending import Ending
from megatron_fleet.agents.engine import EngineLost
from megatron_fleet.agents.local_tools import LocalTools, Rewritable, offered
from megatron_fleet.agents.outputs import ToolOutputs
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.sight import Look, Seen
from megatron_fleet.agents.toolbox import Toolbox, reset
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Environment, EnvLost, Observation
from megatron_fleet.models.chat.parser import ParsedTurn
from megatron_fleet.models.chat.renderer import ToolResult

MIN_TURN_TOKENS = 16
"""A turn starts only if at least this many tokens (or a full turn, if shorter) still fit into the context."""
MAX_CHARS_PER_TOKEN = 16
"""A first prompt with more characters per token of the context is too long; it is neither encoded nor sent."""


class Conversation(Protocol):
    """The policy's side of an episode. It records messages in the builder that it was created with.

    Attributes:
        look: converts an observation to what the policy sees of its images.
        trouble: why the pending request has no answer yet, if an attempt failed; empty otherwise.
    """

    look: Look
    trouble: str

    async def begin(self, system: str, tools: tuple[dict[str, Any], ...], user: str, seen: Seen) -> Ending | None:
        """Set up the first prompt; return an ending when it leaves no room for a turn."""
        ...

    @property
    def history(self) -> Rewritable:
        """History from which the agent's own tools can remove earlier turns; available after `begin`."""
        ...

    async def turn(self, number: int, deadline: asyncio.Timeout) -> ParsedTurn | Ending:
        """Let the policy take turn ``number``, counted from 0; return an ending when it exceeded a limit.

        Raises:
            EngineLost: there is no answer and none will come.
        """
        ...

    async def show(self, results: Sequence[ToolResult]) -> Ending | None:
        """Show the results of the turn's calls, or a reminder without any; return an ending when they do not fit."""
        ...

    def status(self, tokens: int) -> str:
        """Describe context usage. ``tokens``: prompt length, for a conversation without counts of its own."""
        ...


async def play(
    task: Task,
    group: int,
    sample: int,
    env: Environment,
    conversation: Conversation,
    settings: EpisodeSettings,
    builder: TrajectoryBuilder,
) -> Trajectory:
    """Play ``task`` once: reset, turns until something ends the episode, verify, close.

    Anything that the policy, the environment and the engine do within their protocols results in a Trajectory. Playing
    and verifying have separate deadlines, so that an episode that ran out of time can still be scored. The environment
    is always closed, even on cancellation.

    Raises:
        CancelledError: after the environment was closed.
    """
    began = time.perf_counter()
    try:
        end = await _Play(task, env, conversation, settings, builder).until_deadline()
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
    conversation: Conversation
    settings: EpisodeSettings
    builder: TrajectoryBuilder
    local: LocalTools = field(init=False)
    toolbox: Toolbox = field(init=False)

    async def until_deadline(self) -> Ending:
        limit = self.settings.episode_timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._episode(deadline)
        except TimeoutError:
            if not deadline.expired():
                raise
            if not self.builder.messages:
                return Ending(Outcome.ENV_FAILED, f"the environment did not start within {limit:g} s")
            if self.conversation.trouble:
                return Ending(Outcome.ABORTED, f"the endpoint gave no answer: {self.conversation.trouble}")
            return Ending(Outcome.TIMEOUT, f"the episode did not end within {limit:g} s")
        except EnvLost as e:
            return Ending(Outcome.ENV_FAILED, f"environment lost: {e}")
        except EngineLost as e:
            return Ending(Outcome.ABORTED, str(e))

    async def _episode(self, deadline: asyncio.Timeout) -> Ending:
        with timed(self.builder, "env_s"):
            first = await reset(self.env, self.task)
        if (end := await self._begin(first)) is not None:
            return end
        turns_without_call = 0
        for turn in range(self.settings.max_turns):
            parsed = await self.conversation.turn(turn, deadline)
            if isinstance(parsed, Ending):
                return parsed
            if (answer := self._final_answer(parsed)) is not None:
                return Ending(Outcome.COMPLETED, final_answer=answer)
            results, env_done = await self.toolbox.act(parsed)
            if env_done:
                return Ending(Outcome.COMPLETED)
            turns_without_call = 0 if parsed.tool_calls else turns_without_call + 1
            if turns_without_call == self.settings.max_no_action_turns:
                return Ending(Outcome.NO_ACTION)
            if turn + 1 < self.settings.max_turns and (end := await self.conversation.show(results)) is not None:
                return end
        return Ending(Outcome.MAX_TURNS)

    async def _begin(self, first: Observation) -> Ending | None:
        agent, prompts, talk = self.settings.agent, self.settings.prompts, self.conversation
        system = prompts.system_text(self.task.env_key, agent.finish)
        seen = await talk.look(first.content, first.images)
        if seen.unseen:
            self.builder.count("images_unseen", seen.unseen)
        user = prompts.user_text(self.task, seen.text)
        own = offered(agent)
        names = {tool["function"]["name"] for tool in own}
        tools = (*(tool for tool in first.tools if tool["function"]["name"] not in names), *own)
        self.builder.say("system", system)
        limit = MAX_CHARS_PER_TOKEN * self.settings.max_context
        if len(system) + len(user) + len(json.dumps(tools)) > limit:
            self.builder.say("user", user[:limit])
            return Ending(Outcome.PROMPT_TOO_LONG, f"the first prompt has more than {limit} characters")
        self.builder.say("user", user, seen.images)
        end = await talk.begin(system, tools, user, seen)
        outputs = ToolOutputs(agent.max_tool_output_chars, agent.paging)
        self.local = LocalTools(agent, outputs, talk.history, self.builder, talk.status)
        self.toolbox = Toolbox(self.env, self.settings, self.builder, outputs, self.local, talk.look)
        return end

    def _final_answer(self, parsed: ParsedTurn) -> str | None:
        if self.settings.agent.finish == "done_tag":
            return parsed.final_answer
        return None if parsed.errors else self.local.final_answer(parsed.tool_calls)
