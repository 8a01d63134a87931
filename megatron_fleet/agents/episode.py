"""One episode: an async procedure that plays a Task and returns a Trajectory, independent of how the policy is reached.

`token_conversation` talks to an engine in token ids, `chat_conversation` to an OpenAI-compatible endpoint in messages.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fleet.agents.builder import TrajectoryBuilder, timed
from megatron_fleet.agents.history import History
from megatron_fleet.agents.images import View, Viewer
from megatron_fleet.agents.local_tools import LocalTools, ToolOutputs, offered
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.token_engine import EngineLost, EngineRefused
from megatron_fleet.agents.toolbox import Toolbox, reset
from megatron_fleet.agents.trajectory import CAUSES, Cause, Outcome, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Environment, EnvLost, EnvRefused, Observation
from megatron_fleet.models.chat.parser import ParsedTurn, ToolResult
from megatron_fleet.platform.deadlines import deadline

MAX_CHARS_PER_TOKEN = 16
"""A first prompt with more characters per token of the context is too long; it is neither encoded nor sent."""
VERIFY_GRACE_S = 2.0
"""Margin above the environment's own deadline for verify, which should fire first because it knows the reason."""
CLOSE_GRACE_S = 5.0
"""The same margin for close."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of an episode's turns. ``reason``: explanation of an unknown reward, or the verifier's own."""

    outcome: Outcome
    reason: str = ""
    final_answer: str | None = None


class Conversation(Protocol):
    """The policy's side of an episode. It records messages in the builder that it was created with.

    Attributes:
        viewer: converts an observation to what the policy sees of its images.
        trouble: why the pending request has no answer yet, if an attempt failed; empty otherwise.
    """

    viewer: Viewer
    trouble: str

    async def begin(self, system: str, tools: tuple[dict[str, Any], ...], user: str, view: View) -> Ending | None:
        """Set up the first prompt; return an ending when it leaves no room for a turn."""
        ...

    @property
    def history(self) -> History[Any]:
        """History from which the agent's own tools can remove earlier turns; available after `begin`."""
        ...

    async def turn(self, number: int, deadline: asyncio.Timeout) -> ParsedTurn | Ending:
        """Let the policy take turn ``number``, counted from 0; return an ending when it exceeded a limit.

        Raises:
            EngineLost: there is no answer and none will come.
            EngineRefused: the request is refused, and would be again.
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
    at, began = time.time(), time.perf_counter()
    try:
        end = await _Turns(task, env, conversation, settings, builder).until_deadline()
        with timed(builder, "verify"):
            end, reward = await score(end, env, builder.messages, settings.verify_timeout_s)
    finally:
        await close(env, settings.close_timeout_s)
    builder.metrics["seconds"] = time.perf_counter() - began
    builder.stretches.insert(0, ("episode", at, builder.metrics["seconds"]))
    return builder.build(task, end.outcome, reward, end.reason, end.final_answer)


@dataclass(slots=True)
class _Turns:
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
            async with deadline(limit) as timeout:
                return await self._episode(timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            if not self.builder.messages:
                return Ending(Outcome.ENV_FAILED, f"the environment did not start within {limit:g} s")
            if self.conversation.trouble:
                return Ending(Outcome.ABORTED, f"the endpoint gave no answer: {self.conversation.trouble}")
            return Ending(Outcome.TIMEOUT, f"the episode did not end within {limit:g} s")
        except EnvRefused as e:
            return Ending(Outcome.REFUSED, f"the environment refuses: {e}")
        except EnvLost as e:
            return Ending(Outcome.ENV_FAILED, f"environment lost: {e}")
        except EngineRefused as e:
            return Ending(Outcome.REFUSED, str(e))
        except EngineLost as e:
            return Ending(Outcome.ABORTED, str(e))

    async def _episode(self, timeout: asyncio.Timeout) -> Ending:
        with timed(self.builder, "env"):
            first = await reset(self.env, self.task)
        if (end := await self._begin(first)) is not None:
            return end
        turns_without_call = 0
        for turn in range(self.settings.max_turns):
            parsed = await self.conversation.turn(turn, timeout)
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
        view = await talk.viewer(first.content, first.images)
        if view.unseen:
            self.builder.count("images_unseen", view.unseen)
        user = prompts.user_text(self.task, view.text)
        own = offered(agent)
        names = {tool["function"]["name"] for tool in own}
        tools = (*(tool for tool in first.tools if tool["function"]["name"] not in names), *own)
        system = prompts.system_text(self.task.env_key, agent.finish, bool(tools), self.settings.max_turns > 1)
        self.builder.say("system", system)
        limit = MAX_CHARS_PER_TOKEN * self.settings.max_context
        if len(system) + len(user) + len(json.dumps(tools)) > limit:
            self.builder.say("user", user[:limit])
            return Ending(Outcome.PROMPT_TOO_LONG, f"the first prompt has more than {limit} characters")
        self.builder.say("user", user, view.images)
        end = await talk.begin(system, tools, user, view)
        outputs = ToolOutputs(agent.max_tool_output_chars, agent.paging)
        self.local = LocalTools(agent, outputs, talk.history, self.builder, talk.status)
        self.toolbox = Toolbox(self.env, self.settings, self.builder, outputs, self.local, talk.viewer)
        return end

    def _final_answer(self, parsed: ParsedTurn) -> str | None:
        if self.settings.agent.finish == "done_tag":
            return parsed.final_answer
        return None if parsed.errors else self.local.final_answer(parsed.tool_calls)


async def score(
    ending: Ending, env: Environment, conversation: list[dict[str, Any]], verify_timeout_s: float
) -> tuple[Ending, float | None]:
    """Run the verifier if there is anything to verify; an unknown reward comes with a reason."""
    if CAUSES[ending.outcome] is not Cause.POLICY:
        return ending, None
    limit = verify_timeout_s + VERIFY_GRACE_S
    try:
        async with asyncio.timeout(limit):
            reward = await env.verify(ending.final_answer, conversation)
        value, reason = reward.value, reward.reason
    except TimeoutError:
        value, reason = None, f"the verifier gave no answer within {limit:g} s"
    except EnvLost as e:
        value, reason = None, f"environment lost before it could verify: {e}"
    if value is not None and not math.isfinite(value):
        value, reason = None, f"the verifier returned {value}"
    timed_out = ending.outcome is Outcome.TIMEOUT
    outcome = Outcome.VERIFIER_FAILED if value is None and not timed_out else ending.outcome
    return Ending(outcome, reason, ending.final_answer), value


async def close(env: Environment, close_timeout_s: float) -> None:
    """Close within the deadline, even if cancelled (repeatedly); the cancellation is re-raised afterwards."""
    closing = asyncio.create_task(env.close())
    loop = asyncio.get_running_loop()
    limit = close_timeout_s + CLOSE_GRACE_S
    end = loop.time() + limit
    cancelled: asyncio.CancelledError | None = None
    while not closing.done() and loop.time() < end:
        try:
            await asyncio.wait({closing}, timeout=end - loop.time())
        except asyncio.CancelledError as e:
            cancelled = e
    if not closing.done():
        closing.cancel()
        log.warning("an environment did not close within %g s", limit)
    elif not closing.cancelled() and (error := closing.exception()):
        log.warning("an environment failed to close: %r", error)
    if cancelled is not None:
        raise cancelled
