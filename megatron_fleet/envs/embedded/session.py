"""EmbeddedSession: one episode's state. The server keeps one per client; demonstrations use it in their own process."""

from __future__ import annotations

import sqlite3
from typing import Any

from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import Observation, ToolCall, ToolError
from megatron_fleet.envs.embedded.tasks import make_world
from megatron_fleet.envs.embedded.verify import run_verifier
from megatron_fleet.envs.embedded.world import ToolFailure


def openai_tool(spec: dict[str, Any]) -> dict[str, Any]:
    """A tool specification in OpenAI function format."""
    return {"type": "function", "function": spec}


class EmbeddedSession:
    """A world playing one task.

    Raises:
        KeyError: the task is of no embedded environment.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.world = make_world(task.env_key, task.data_key or "default", task.env_variables)

    def tools(self) -> tuple[dict[str, Any], ...]:
        """The tools in OpenAI function format."""
        return tuple(openai_tool(spec) for spec in self.world.tools())

    def call(self, call: ToolCall) -> Observation:
        """Call one tool; a failing tool is an Observation with ``error``."""
        try:
            return Observation(self.world.call(call.name, call.arguments))
        except ToolFailure as failure:
            return Observation("", error=ToolError(failure.kind, str(failure)))
        except (sqlite3.Error, UnicodeError, OverflowError) as error:
            # Text that no database takes, such as half a surrogate pair.
            return Observation("", error=ToolError("invalid_args", type(error).__name__))

    def verify(self, final_answer: str | None) -> float:
        """Run the verifier in this process: only for tasks that this package generated. Raises what it raises."""
        return run_verifier(self.task.verifier_code, self.world.seed, self.world.current(), final_answer, None)

    def close(self) -> None:
        self.world.close()
