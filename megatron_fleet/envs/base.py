"""Interface of an environment: four async methods, their results, and two exceptions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fleet.data.task import Task

MAX_REASON_CHARS = 500
"""Limit of a reason, which servers word and which goes into every log and record; a frame may hold 100 MiB."""
_MARKS = (
    "capacity_reached",
    "instance limit",
    "rate limit",
    "too many in-flight",
    "temporarily unavailable",
    '"retryable": true',
    '"retryable":true',
    "'retryable': true",
)
"""Lower-case markers of transient refusals by OpenEnv's and Fleet's servers."""


class EnvBusy(Exception):
    """No capacity now. The caller may retry after a pause."""

    def __init__(self, reason: object = "") -> None:
        super().__init__(cut_reason(str(reason)))


class EnvLost(Exception):
    """The session is gone or can no longer be trusted. The episode ends with an unknown reward."""

    def __init__(self, reason: object = "") -> None:
        super().__init__(cut_reason(str(reason)))


class EnvRefused(EnvLost):
    """The environment cannot play this task with this configuration, and another attempt would fail in the same way."""


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", clean_text(self.message))


@dataclass(frozen=True, slots=True)
class Image:
    """An unmodified image from an environment: ``data`` is the encoded file, ``media_type`` its MIME type."""

    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Observation:
    """Output of a reset or a tool call, whose texts are made valid UTF-8 here.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "content", clean_text(self.content))
        object.__setattr__(self, "tools", tuple(clean_json(list(self.tools))))


@dataclass(frozen=True, slots=True)
class Reward:
    """The verifier's score. ``value`` is ``None`` when it is unknown (never 0 for a failed verifier).

    ``reason`` is cut at `MAX_REASON_CHARS`.
    """

    value: float | None
    reason: str
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", cut_reason(self.reason))


class Environment(Protocol):
    """One session of one environment. Used by one coroutine at a time; every method has its own deadline."""

    async def reset(self, task: Task) -> Observation:
        """Start the task. Raises EnvBusy (retry), EnvRefused (no attempt can succeed) or EnvLost."""
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


def cut_reason(text: str) -> str:
    """Return ``text`` as valid UTF-8 of at most `MAX_REASON_CHARS` characters."""
    return clean_text(text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1] + "…")


def clean_text(text: str) -> str:
    """Return ``text`` as valid UTF-8: JSON may hold lone surrogates, which no request or file can."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()


def clean_json(value: Any) -> Any:
    """Return a JSON value that can be sent: its texts, keys included, as by `clean_text`, NaN and infinities as null.

    JSON has no such numbers, but Python reads and writes them.
    """
    written = json.dumps(value, ensure_ascii=False)
    clean = clean_text(written)
    if clean is written and "NaN" not in written and "Infinity" not in written:
        return value
    return json.loads(clean, parse_constant=lambda _: None)


def is_busy(error: BaseException) -> bool:
    """Return whether ``error`` or one of its causes says that the server currently has no capacity."""
    return any(mark in f"{type(e).__name__} {e}".lower() for e in _chain(error) for mark in (*_MARKS, "instancelimit"))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from _chain(part)
        error = error.__cause__ or error.__context__
