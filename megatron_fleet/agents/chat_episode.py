"""One episode with a model behind an OpenAI-compatible endpoint: messages in, messages out, no token ids.

Everything but the conversation's form is that of ``episode.py``: tasks, texts, tools, limits, endings, verification.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron_fleet.agents import ending
from megatron_fleet.agents.builder import TrajectoryBuilder, timed
from megatron_fleet.agents.chat_client import Answer, ChatClient, ChatParams, PromptTooLong, Usage
from megatron_fleet.agents.chat_history import ChatHistory, answers, reminder
from megatron_fleet.agents.chat_turn import ChatTurn, read_turn
from megatron_fleet.agents.ending import Ending
from megatron_fleet.agents.engine import EngineLost
from megatron_fleet.agents.episode import MIN_TURN_TOKENS
from megatron_fleet.agents.local_tools import LocalTools, offered
from megatron_fleet.agents.outputs import ToolOutputs
from megatron_fleet.agents.renderer import ToolResult
from megatron_fleet.agents.settings import EpisodeSettings, stable_seed
from megatron_fleet.agents.sight import Look, see, show_all
from megatron_fleet.agents.toolbox import Toolbox, reset
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Environment, EnvLost, Observation

SEED_BITS = 31
"""Servers differ in how large a seed they take."""


async def run_chat_episode(
    task: Task,
    group: int,
    sample: int,
    env: Environment,
    client: ChatClient,
    settings: EpisodeSettings,
    seed: int | None,
) -> Trajectory:
    """Play ``task`` once, as ``run_episode`` does.

    The trajectory has no tokens (T = 0); its messages are the conversation. Token metrics are the endpoint's own
    counts, and absent where it does not tell them: ``action_tokens`` (completions), ``prompt_tokens`` (all requests),
    ``think_tokens`` (reasoning), ``total_tokens`` (the last request and its answer).

    Args:
        seed: of this episode; each turn derives its own. ``None`` leaves sampling unseeded.

    Raises:
        CancelledError: after the environment was closed.
    """
    began = time.perf_counter()
    builder = TrajectoryBuilder()
    play = _ChatPlay(task, env, client, settings, seed, builder)
    try:
        end = await play.until_deadline()
        with timed(builder, "verify_s"):
            end, reward = await ending.score(end, env, builder.messages, settings.verify_timeout_s)
    finally:
        await ending.close(env, settings.close_timeout_s)
    builder.metrics["seconds"] = time.perf_counter() - began
    trajectory = builder.build(task, group, sample, end.outcome, reward, end.reason, end.final_answer)
    for name in ("action_tokens", "total_tokens", "segments"):
        trajectory.metrics.pop(name)
    trajectory.metrics |= play.tokens()
    return trajectory


@dataclass(slots=True)
class _ChatPlay:
    """The turns of one episode. ``trouble``: why the request under way was not answered yet, if a try failed."""

    task: Task
    env: Environment
    client: ChatClient
    settings: EpisodeSettings
    seed: int | None
    builder: TrajectoryBuilder
    history: ChatHistory = field(init=False)
    local: LocalTools = field(init=False)
    toolbox: Toolbox = field(init=False)
    deadline: asyncio.Timeout = field(init=False)
    tools: tuple[dict[str, Any], ...] = ()
    usages: list[Usage] = field(default_factory=list)
    trouble: str = ""

    def tokens(self) -> dict[str, float]:
        """What the endpoint told of its tokens; nothing unless it told so of every turn."""
        if not self.usages or len(self.usages) != self.builder.turns:
            return {}
        return {
            "action_tokens": sum(usage.completion for usage in self.usages),
            "prompt_tokens": sum(usage.prompt for usage in self.usages),
            "think_tokens": sum(usage.reasoning for usage in self.usages),
            "total_tokens": self.usages[-1].prompt + self.usages[-1].completion,
        }

    async def until_deadline(self) -> Ending:
        limit = self.settings.episode_timeout_s
        try:
            async with asyncio.timeout(limit) as self.deadline:
                return await self._episode()
        except TimeoutError:
            if not self.deadline.expired():
                raise
            if not self.builder.messages:
                return Ending(Outcome.ENV_FAILED, f"the environment did not start within {limit:g} s")
            if self.trouble:
                return Ending(Outcome.ABORTED, f"the endpoint gave no answer: {self.trouble}")
            return Ending(Outcome.TIMEOUT, f"the episode did not end within {limit:g} s")
        except EnvLost as e:
            return Ending(Outcome.ENV_FAILED, f"environment lost: {e}")
        except EngineLost as e:
            return Ending(Outcome.ABORTED, str(e))
        except PromptTooLong as e:
            return Ending(Outcome.CONTEXT_OVERFLOW if self.builder.turns else Outcome.PROMPT_TOO_LONG, str(e))

    async def _episode(self) -> Ending:
        with timed(self.builder, "env_s"):
            first = await reset(self.env, self.task)
        await self._begin(first)
        turns_without_call = 0
        for turn in range(self.settings.max_turns):
            max_tokens = min(self.settings.max_tokens_per_turn, self._room())
            if max_tokens < min(MIN_TURN_TOKENS, self.settings.max_tokens_per_turn):
                return Ending(Outcome.CONTEXT_OVERFLOW)
            answer = await self._generate(turn, max_tokens)
            said = read_turn(answer.message, turn, self.client.endpoint.return_reasoning)
            self.builder.say("assistant", said.text)
            if (end := self._cut_off(answer, max_tokens)) is not None:
                return end
            if (final := self._final_answer(said)) is not None:
                return Ending(Outcome.COMPLETED, final_answer=final)
            results, env_done = await self.toolbox.act(said.parsed)
            if env_done:
                return Ending(Outcome.COMPLETED)
            turns_without_call = 0 if said.parsed.tool_calls else turns_without_call + 1
            if turns_without_call == self.settings.max_no_action_turns:
                return Ending(Outcome.NO_ACTION)
            if turn + 1 < self.settings.max_turns:
                self._show(said, results)
        return Ending(Outcome.MAX_TURNS)

    async def _begin(self, first: Observation) -> None:
        agent, prompts = self.settings.agent, self.settings.prompts
        look: Look = show_all if self.client.endpoint.images else partial(see, vision=None, sentence=prompts.unseen)
        seen = await look(first.content, first.images)
        if seen.unseen:
            self.builder.count("images_unseen", seen.unseen)
        system = prompts.system_text(self.task.env_key, agent.finish)
        user = prompts.user_text(self.task, seen.text)
        own = offered(agent)
        names = {tool["function"]["name"] for tool in own}
        self.tools = (*(tool for tool in first.tools if tool["function"]["name"] not in names), *own)
        outputs = ToolOutputs(agent.max_tool_output_chars, agent.paging)
        self.history = ChatHistory(system, user, seen.images, prompts.removed)
        self.local = LocalTools(agent, outputs, self.history, self.builder, lambda _: self._status())
        self.toolbox = Toolbox(self.env, self.settings, self.builder, outputs, self.local, look)
        self.builder.say("system", system)
        self.builder.say("user", user, seen.images)

    async def _generate(self, turn: int, max_tokens: int) -> Answer:
        seed = None if self.seed is None else stable_seed(self.seed, turn) >> (63 - SEED_BITS)
        params = ChatParams(self.settings.temperature, max_tokens, seed)
        with timed(self.builder, "generate_s"):
            answer = await self.client.complete(self.history.messages(), self.tools, params, self._failed)
        self.trouble, self.history.shortened = "", False
        self.builder.turns += 1
        if answer.usage is not None:
            self.usages.append(answer.usage)
        return answer

    def _failed(self, reason: str, seconds: float) -> None:
        """A try was not answered, by no fault of the policy's: the episode gets the time back, to twice its own."""
        self.trouble = reason
        self.builder.count("request_retries")
        limit, before = self.settings.episode_timeout_s, self.builder.metrics.get("endpoint_wait_s", 0.0)
        self.builder.count("endpoint_wait_s", seconds)
        due = self.deadline.when()
        if due is not None and not self.deadline.expired():
            self.deadline.reschedule(due + min(before + seconds, limit) - min(before, limit))

    def _cut_off(self, answer: Answer, max_tokens: int) -> Ending | None:
        """How the episode ends if this turn went beyond a limit."""
        if self.usages and self._room() < 0:
            first = self.builder.turns == 1 and self.usages[-1].prompt >= self.settings.max_context
            return Ending(Outcome.PROMPT_TOO_LONG if first else Outcome.CONTEXT_OVERFLOW)
        if answer.finish_reason != "length":
            return None
        shrunk = max_tokens < self.settings.max_tokens_per_turn
        return Ending(Outcome.CONTEXT_OVERFLOW if shrunk else Outcome.GENERATION_TRUNCATED)

    def _final_answer(self, said: ChatTurn) -> str | None:
        if self.settings.agent.finish == "done_tag":
            return said.parsed.final_answer
        return None if said.parsed.errors else self.local.final_answer(said.parsed.tool_calls)

    def _show(self, said: ChatTurn, results: list[ToolResult]) -> None:
        note = f"[{self._status()}]" if self.settings.agent.context_status else ""
        if results:
            self.history.add([said.message, *answers(said, results, note)])
            return
        text = "\n".join(filter(None, (self.settings.prompts.reminder_text(self.settings.agent.finish), note)))
        self.builder.say("user", text)
        self.history.add([said.message, reminder(text)])

    def _room(self) -> int:
        """Tokens of the context that the newest turn and what was before it left, as far as is known."""
        return self.settings.max_context - (0 if self.history.shortened else self._used())

    def _used(self) -> int:
        if not self.usages:
            return 0
        last = self.usages[-1]
        forgotten = 0 if self.client.endpoint.return_reasoning else last.reasoning
        return last.prompt + last.completion - forgotten

    def _status(self) -> str:
        used, limit = (str(self._used()) if self.usages else "unknown"), self.settings.max_context
        return f"Context: {used}/{limit} tokens, turn {self.builder.turns}/{self.settings.max_turns}"
