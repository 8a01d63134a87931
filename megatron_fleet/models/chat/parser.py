"""Parser of a sampled turn: thinking, text, tool calls, final answer. Any text yields a ParsedTurn.

Each family folder defines its tool-call syntax as a ``Syntax``; everything else is shared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_fleet.envs.base import Image, ToolCall

DONE = "<done>"
MAX_CALLS = 16
"""Maximum calls read per turn, so that a repetitive policy does not flood its context with results and errors."""
MAX_TRIED = 256
"""The same limit including calls that a ``</think>`` turns into thinking: reading one may take linear time."""
_THINK, _THOUGHT = "<think>", "</think>"

Tools = Sequence[Mapping[str, Any]]
"""Tool definitions in the OpenAI function format."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of one tool call of the last turn, as shown to the policy.

    Attributes:
        name: tool name; empty for a call that could not be read.
        text: the result, or a sentence describing the error.
        index: 0-based number of the call in the episode; unreadable calls count too.
        call_id: id the policy wrote (``ParsedTurn.call_ids``); empty if the syntax has none.
        images: in the order of their positions ``[image n]`` in ``text``, n from 1; those without a position follow it.
    """

    name: str
    text: str
    index: int
    call_id: str = ""
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One assistant turn.

    Attributes:
        thinking: content of ``<think>``; has no effect.
        content: text outside thinking and tool calls, without a ``<done>`` at its end, stripped.
        tool_calls: well-formed calls in order.
        errors: one sentence, shown to the policy, for each tool call that could not be read.
        final_answer: text before the ``<done>`` that ends the turn; ``None`` without one, or if the turn also attempted
            a tool call, because the policy has not seen that call's result yet.
        call_ids: the policy's own id for each of ``tool_calls``; empty if the syntax has none.
    """

    thinking: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    final_answer: str | None
    call_ids: tuple[str, ...] = ()


class BadCall(ValueError):
    """A malformed call. The message is shown to the policy as a sentence, without its full stop."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A parsed call: the id the policy wrote (or nothing), and the offset of the text after the call."""

    call: ToolCall
    call_id: str
    end: int


@dataclass(frozen=True)
class Syntax:
    """Tool-call syntax of a model family.

    Attributes:
        opening, closing: text before and after one call.
        around: tags between and around calls that have no meaning of their own.
        read: reads the call that follows ``opening`` at an offset of a text, with its closing tag, which may be
            missing at the end of the text (a stop string is stripped). Raises BadCall.
        begins: pattern of the first characters of a call whose ``opening`` is missing; ``read`` starts there.
    """

    opening: str
    closing: str
    read: Callable[[str, int, Tools], WrittenCall]
    around: tuple[str, ...] = ()
    begins: str = r"(?!)"

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """Pattern of the tags that change the meaning of the text after them; its group holds ``begins``."""
        tags = "|".join(map(re.escape, (_THINK, _THOUGHT, self.opening, self.closing, *self.around)))
        return re.compile(f"{tags}|({self.begins})", re.MULTILINE)

    @cached_property
    def edge(self) -> re.Pattern[str]:
        """Pattern of the positions where parsing resumes after an unreadable call."""
        return _any_of(self.opening, self.closing, _THOUGHT, *self.around)


def _any_of(*tags: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def parse_turn(text: str, syntax: Syntax, tools: Tools = ()) -> ParsedTurn:
    """Parse one turn from left to right; never raises.

    A ``</think>`` without its ``<think>`` makes everything before it thinking (the model continued a block it assumed
    to be open), and an unclosed ``<think>`` extends to the end. Tags inside the arguments of a call are data.

    A call without its opening tag counts if a tool of that name was offered. What only looks like one is an error,
    unless the turn ends in ``<done>`` or no tools were offered: then it is text.

    Args:
        tools: tools that were offered; syntaxes that do not quote strings use their schemas to type the arguments.
    """
    thinking: list[str] = []
    content: list[str] = []
    calls: list[WrittenCall] = []
    errors: list[str] = []
    unopened: list[str] = []  # errors of what may be a call without its opening tag
    tried = 0
    start = continued = 0  # text[:continued] is thinking that was opened before this turn
    while tag := syntax.tag.search(text, start):
        content.append(text[start : tag.start()])
        start = tag.end()
        if tag[0] == _THINK:
            end = text.find(_THOUGHT, start)
            thinking.append(text[start:] if end < 0 else text[start:end])
            start = len(text) if end < 0 else end + len(_THOUGHT)
        elif tag[0] == _THOUGHT:
            continued = tag.start()
            thinking, content, calls, errors, unopened = [], [], [], [], []
        elif tag[0] == syntax.opening and len(calls) + len(errors) < MAX_CALLS and tried < MAX_TRIED:
            tried += 1
            start = _read_call(text, start, syntax, tools, calls, errors)
        elif tag[0] == syntax.opening:
            errors.append(f"Invalid tool call: only the first {MAX_CALLS} of a turn are read.")
            end = text.find(_THOUGHT, start)
            start = len(text) if end < 0 else end
        elif tag[1] is not None and tools and len(calls) + len(errors) < MAX_CALLS and tried < MAX_TRIED:
            tried += 1
            try:
                calls.append(_read_unopened(text, tag.start(), syntax, tools))
                start = calls[-1].end
            except BadCall as e:
                content.append(tag[0])
                unopened.append(f"Invalid tool call: {syntax.opening} is missing before it, and {e}.")
        elif tag[0] not in syntax.around:
            if tag[0] == syntax.closing and tools and content[-1].strip():
                unopened.append(f"Invalid tool call: {syntax.opening} is missing before {syntax.closing}.")
            content.append(tag[0])
    content.append(text[start:])
    said = "".join(content).strip()
    answer = _before_done(said)
    done = len(answer) < len(said) and not calls and not errors
    return ParsedTurn(
        thinking="\n".join(t.strip() for t in (text[:continued], *thinking) if t.strip()),
        content=answer,
        tool_calls=tuple(c.call for c in calls),
        errors=(*errors, *(() if done else unopened[:1])),
        final_answer=answer if done else None,
        call_ids=tuple(c.call_id for c in calls),
    )


def _read_unopened(text: str, start: int, syntax: Syntax, tools: Tools) -> WrittenCall:
    """Read the call at ``start``, which has no opening tag. Raises BadCall, also for a tool that was not offered."""
    written = syntax.read(text, start, tools)
    functions = [tool.get("function") for tool in tools]
    if not any(isinstance(f, Mapping) and f.get("name") == written.call.name for f in functions):
        raise BadCall(f"there is no tool {written.call.name!r}")
    return written


def _before_done(text: str) -> str:
    """Return ``text`` without every ``<done>`` at its end, and the space before them."""
    end = len(text)
    while text.endswith(DONE, 0, end):
        end -= len(DONE)
        while end and text[end - 1].isspace():
            end -= 1
    return text[:end]


def _read_call(text: str, start: int, syntax: Syntax, tools: Tools, calls: list[WrittenCall], errors: list[str]) -> int:
    """Read the call at ``start`` into ``calls`` or ``errors``; return the offset of the text after it."""
    try:
        calls.append(syntax.read(text, start, tools))
        return calls[-1].end
    except BadCall as e:
        errors.append(f"Invalid tool call: {e}.")
    edge = syntax.edge.search(text, start)
    if edge is None:
        return len(text)
    return edge.end() if edge[0] == syntax.closing else edge.start()
