"""Interface of an environment: four async methods, their results, and two exceptions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fleet.data.task import Task


class EnvBusy(Exception):
    """No capacity now. The caller may retry after a pause."""


class EnvLost(Exception):
    """The session is gone or can no longer be trusted. The episode ends with an unknown reward."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call as requested by the policy; ``arguments`` is always a JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolError:
    """A failed tool call. ``kind``: tool_not_found, invalid_args, execution_error, timeout or transport_error."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Image:
    """An unmodified image from an environment: ``data`` is the encoded file, ``media_type`` its MIME type."""

    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Observation:
    """Output of a reset or a tool call.

    Attributes:
        content: the tool's result as text (JSON for structured results); on reset the task's prompt. ``[image n]``,
            n from 1, marks the place of an image.
        tools: OpenAI function format; set by ``reset`` only.
        error: set when the call failed; ``content`` is then empty.
        done: the environment ended the episode.
        images: in the order of their places in ``content``.
    """

    content: str
    tools: tuple[dict[str, Any], ...] = ()
    error: ToolError | None = None
    done: bool = False
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Reward:
    """The verifier's score. ``value`` is ``None`` when it is unknown (never 0 for a failed verifier)."""

    value: float | None
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One session of one environment. Used by one coroutine at a time; every method has its own deadline."""

    async def reset(self, task: Task) -> Observation:
        """Start the task. Raises EnvBusy (retry) or EnvLost."""
        ...

    async def step(self, call: ToolCall) -> Observation:
        """Call one tool. A failing tool is an Observation with ``error``; raises only EnvLost."""
        ...

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """Score the episode once, with the task's own verifier. Never raises for a failing verifier."""
        ...

    async def close(self) -> None:
        """Release the session. Idempotent; never raises."""
        ...
