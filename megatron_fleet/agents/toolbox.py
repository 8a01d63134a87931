"""Execution of an episode's tool calls: the environment's and the agent's own."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

from megatron_fleet.agents.builder import TrajectoryBuilder, timed
from megatron_fleet.agents.images import View, Viewer
from megatron_fleet.agents.local_tools import LocalTools, ToolOutputs
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, Environment, Observation, ToolCall
from megatron_fleet.models.chat.parser import ParsedTurn, ToolResult

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
        viewer: Viewer,
    ) -> None:
        """``viewer``: converts a result to what the policy sees of its images."""
        self._env, self._settings, self._builder = env, settings, builder
        self._outputs, self._local, self._viewer = outputs, local, viewer
        self._repetition = Repetition()
        self._answered = 0

    async def act(self, parsed: ParsedTurn) -> tuple[list[ToolResult], bool]:
        """Run a turn's tool calls. Returns the results (empty: send a reminder) and whether the environment is done."""
        results: list[ToolResult] = []
        for call, call_id in zip(parsed.tool_calls, parsed.call_ids, strict=True):
            if self._local.has(call.name):
                view, done = View(self._local.answer(call)), False
            else:
                view, done = await self._call(call)
            results.append(self._answer(call.name, view, call_id))
            if done:
                return results, True
        if parsed.errors:
            self._builder.count("parse_errors")
        elif not parsed.tool_calls:
            self._builder.count("no_action_turns")
        results.extend(self._answer("", View(error)) for error in parsed.errors)
        return results, False

    async def _call(self, call: ToolCall) -> tuple[View, bool]:
        """Run one call of the environment. Returns the result to show and whether the environment is done."""
        with timed(self._builder, "env"):
            observation = await self._env.step(call)
        self._builder.count("tool_calls")
        self._builder.count("repeated_calls", self._repetition.note(call))
        run = self._repetition.run
        self._builder.metrics["max_repeat"] = max(self._builder.metrics.get("max_repeat", 0), run)
        if observation.error is not None:
            self._builder.count("tool_errors")
            view = View(f"Error ({observation.error.kind}): {observation.error.message}")
        else:
            view = await self._viewer(observation.content, observation.images)
            if view.unseen:
                self._builder.count("images_unseen", view.unseen)
        text, cut = self._outputs.cut(view.text)
        self._builder.count("truncated_outputs", cut)
        least = self._settings.agent.repeat_feedback
        if least is not None and run >= least:
            text = self._settings.prompts.repeated.replace("{times}", str(run)) + "\n" + text
        return replace(view, text=text), observation.done

    def _answer(self, name: str, view: View, call_id: str = "") -> ToolResult:
        self._builder.say("tool", view.text, view.images)
        self._answered += 1
        return ToolResult(name, view.text, self._answered - 1, call_id, view.images)


class Repetition:
    """Compares calls by name and arguments, ignoring the order of the arguments.

    Attributes:
        run: number of consecutive equal calls, the newest included.
    """

    def __init__(self) -> None:
        self.run = 0
        self._last = ""
        self._seen: set[str] = set()

    def note(self, call: ToolCall) -> bool:
        """Record a call; return whether it was made before in the episode."""
        written = json.dumps([call.name, call.arguments], sort_keys=True)
        known = written in self._seen
        self.run = self.run + 1 if written == self._last else 1
        self._last = written
        self._seen.add(written)
        return known
