"""What an agent may know of an environment: four async verbs, their results, and two ways to fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fleet.data.task import Task


class EnvBusy(Exception):
    """No capacity now. The caller may try again after a pause."""


class EnvLost(Exception):
    """The session is gone or can no longer be trusted. The episode ends with an unknown reward."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as the policy asked for it; ``arguments`` is always a JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolError:
    """A tool that failed. ``kind``: tool_not_found, invalid_args, execution_error, timeout or transport_error."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image that an environment showed, as it came: ``data`` is the encoded file, ``media_type`` its kind."""

    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment shows.

    Attributes:
        content: the tool's result as text (JSON for structured results); on reset the task's prompt. Where an image
            stood it reads ``[image n]``, n from 1.
        tools: OpenAI function format; set by ``reset`` only.
        error: set when the call failed; ``content`` is then empty.
        done: the environment itself ended the episode.
        images: in the order of their places in ``content``.
    """

    content: str
    tools: tuple[dict[str, Any], ...] = ()
    error: ToolError | None = None
    done: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Reward:
    """The verifier's word. ``value`` is ``None`` when it could not be known (never 0 for a failed verifier)."""

    value: float | None
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One session of one environment. Used by one coroutine at a time; every method has a deadline of its own."""

    async def reset(self, task: Task) -> Observation:
        """Start the task. Raises EnvBusy (try again) or EnvLost."""
        ...

    async def step(self, call: ToolCall) -> Observation:
        """Call one tool. A failing tool is an Observation with ``error``; raises only EnvLost."""
        ...

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """Score the episode with the task's own verifier, once. Never raises for a failing verifier."""
        ...

    async def close(self) -> None:
        """Release the session. Idempotent; never raises."""
        ...
