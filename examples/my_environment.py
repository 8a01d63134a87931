"""An environment of your own: `mfleet train env.kind=my_environment:HigherLower data.tasks=…` (see README.md)."""

from __future__ import annotations

import zlib
from typing import Any

from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Observation, Reward, ToolCall, ToolError

HIGHEST, GUESSES = 100, 7
GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": f"Guess the number, from 1 to {HIGHEST}.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


class HigherLower:
    """Find a number by guesses that are answered with "higher" or "lower". One session; see `Environment`."""

    def __init__(self, config: EnvConfig, episode: str | None) -> None:
        """Args: ``config``: the section ``env``; its deadlines are kept by the caller. ``episode``: its name."""
        self._number, self._guesses = 0, 0
        self._found = False

    async def reset(self, task: Task) -> Observation:
        """Equal tasks have equal numbers."""
        self._number = 1 + zlib.crc32(task.key.encode()) % HIGHEST
        return Observation(task.prompt, tools=(GUESS,))

    async def step(self, call: ToolCall) -> Observation:
        number = call.arguments.get("number")
        if call.name != "guess":
            return Observation("", error=ToolError("tool_not_found", f"no tool {call.name}"))
        if not isinstance(number, int):
            return Observation("", error=ToolError("invalid_args", "number must be an integer"))
        self._guesses += 1
        self._found = number == self._number
        if self._found or self._guesses == GUESSES:
            return Observation("right" if self._found else "no guess is left", done=True)
        return Observation("higher" if number < self._number else "lower")

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        return Reward(float(self._found), f"{self._guesses} guesses")

    async def close(self) -> None:
        return None
