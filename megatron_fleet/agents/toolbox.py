"""Execution of an episode's tool calls: the environment's and the agent's own."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from megatron_fleet.agents.builder import TrajectoryBuilder, timed
from megatron_fleet.agents.local_tools import LocalTools
from megatron_fleet.agents.outputs import ToolOutputs
from megatron_fleet.agents.repetition import Repetition
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.sight import Look, Seen
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, Environment, Observation, ToolCall
from megatron_fleet.models.chat.parser import ParsedTurn
from megatron_fleet.models.chat.renderer import ToolResult

BUSY_PAUSE_S, MAX_BUSY_PAUSE_S = 0.2, 5.0
"""Initial and maximum pause before a busy environment is retried; doubled each time, with jitter."""


async def reset(env: Environment, task: Task) -> Observation:
    """Start ``task``, retrying while the environment is busy; the caller enforces a deadline."""
    pause = BUSY_PAUSE_S
    while True:
        try:
            return await env.reset(task)
        except EnvBusy:
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, MAX_BUSY_PAUSE_S)


class Toolbox:
    """Runs calls in order, formats their results and updates the builder's metrics."""

    def __init__(
        self,
        env: Environment,
        settings: EpisodeSettings,
        builder: TrajectoryBuilder,
        outputs: ToolOutputs,
        local: LocalTools,
        look: Look,
    ) -> None:
        """``look``: converts a result to what the policy sees of its images."""
        self._env, self._settings, self._builder = env, settings, builder
        self._outputs, self._local, self._look = outputs, local, look
        self._repetition = Repetition()
        self._answered = 0

    async def act(self, parsed: ParsedTurn) -> tuple[list[ToolResult], bool]:
        """Run a turn's tool calls. Returns the results (empty: send a reminder) and whether the environment is done."""
        results: list[ToolResult] = []
        for call, call_id in zip(parsed.tool_calls, parsed.call_ids, strict=True):
            if self._local.has(call.name):
                seen, done = Seen(self._local.answer(call)), False
            else:
                seen, done = await self._call(call)
            results.append(self._answer(call.name, seen, call_id))
            if done:
                return results, True
        if parsed.errors:
            self._builder.count("parse_errors")
        elif not parsed.tool_calls:
            self._builder.count("no_action_turns")
        results.extend(self._answer("", Seen(error)) for error in parsed.errors)
        return results, False

    async def _call(self, call: ToolCall) -> tuple[Seen, bool]:
        """Run one call of the environment. Returns the result to show and whether the environment is done."""
        with timed(self._builder, "env_s"):
            observation = await self._env.step(call)
        self._builder.count("tool_calls")
        self._builder.count("repeated_calls", self._repetition.note(call))
        run = self._repetition.run
        self._builder.metrics["max_repeat"] = max(self._builder.metrics.get("max_repeat", 0), run)
        if observation.error is not None:
            self._builder.count("tool_errors")
            seen = Seen(f"Error ({observation.error.kind}): {observation.error.message}")
        else:
            seen = await self._look(observation.content, observation.images)
            if seen.unseen:
                self._builder.count("images_unseen", seen.unseen)
        text, cut = self._outputs.cut(seen.text)
        self._builder.count("truncated_outputs", cut)
        least = self._settings.agent.repeat_feedback
        if least is not None and run >= least:
            text = self._settings.prompts.repeated.replace("{times}", str(run)) + "\n" + text
        return replace(seen, text=text), observation.done

    def _answer(self, name: str, seen: Seen, call_id: str = "") -> ToolResult:
        self._builder.say("tool", seen.text, seen.images)
        self._answered += 1
        return ToolResult(name, seen.text, self._answered - 1, call_id, seen.images)
