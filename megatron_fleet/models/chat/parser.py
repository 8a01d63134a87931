"""What a sampled turn says: thinking, text, tool calls, final answer. Total: any text gives a ParsedTurn.

How a model family writes a tool call is a ``Syntax`` in its family's folder; all the rest is the same for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_fleet.envs.base import ToolCall

DONE = "<done>"
MAX_CALLS = 16
"""Calls read in one turn. A policy that repeats itself must not flood its own context with results and errors."""
MAX_TRIED = 256
"""The same, with those that a ``</think>`` makes thinking: reading one may take time in proportion to the turn."""
_THINK, _THOUGHT = "<think>", "</think>"

Tools = Sequence[Mapping[str, Any]]
"""Tool definitions in the OpenAI function format."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One assistant turn.

    Attributes:
        thinking: what stood in ``<think>``; nothing in it has any effect.
        content: the text outside thinking and tool calls, stripped.
        tool_calls: well-formed calls in order.
        errors: one sentence for each tool call that could not be read; they are shown to the policy.
        final_answer: text before ``<done>``; ``None`` without ``<done>`` and in a turn that also tried a tool call,
            because the policy has not seen that call's result yet.
        call_ids: for each of ``tool_calls`` the id that the policy wrote; empty where the syntax has none.
    """

    thinking: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    final_answer: str | None
    call_ids: tuple[str, ...] = ()


class BadCall(ValueError):
    """The sentence, without its full stop, that tells the policy what is wrong with its call."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call that was read: the id that the policy wrote (or nothing), and where the text goes on behind the call."""

    call: ToolCall
    call_id: str
    end: int


@dataclass(frozen=True)
class Syntax:
    """How a model family writes a tool call.

    Attributes:
        opening, closing: what stands before and after one call.
        around: tags between and around calls that mean nothing by themselves.
        read: reads the call that follows ``opening`` at an offset of a text, with its closing tag, which may be
            missing at the end of the text (a stop string is cut off). Raises BadCall.
    """

    opening: str
    closing: str
    read: Callable[[str, int, Tools], WrittenCall]
    around: tuple[str, ...] = ()

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """Whatever changes the meaning of the text behind it."""
        return _any_of(_THINK, _THOUGHT, self.opening, DONE, *self.around)

    @cached_property
    def edge(self) -> re.Pattern[str]:
        """Where reading goes on after a call that could not be read."""
        return _any_of(self.opening, self.closing, _THOUGHT, *self.around)


def _any_of(*tags: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def parse_turn(text: str, syntax: Syntax, tools: Tools = ()) -> ParsedTurn:
    """Read one turn from left to right; never raises.

    A ``</think>`` without its ``<think>`` makes everything before it thinking (the model continued a block that it
    believed open), and an unclosed ``<think>`` swallows the rest. Tags inside the arguments of a call are data.

    Args:
        tools: what was offered; a syntax that does not mark strings as such tells them from numbers by it.
    """
    thinking: list[str] = []
    content: list[str] = []
    calls: list[WrittenCall] = []
    errors: list[str] = []
    answer_parts: int | None = None
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
            thinking, content, calls, errors, answer_parts = [], [], [], [], None
        elif tag[0] == DONE:
            answer_parts = len(content) if answer_parts is None else answer_parts
        elif tag[0] == syntax.opening and len(calls) + len(errors) < MAX_CALLS and tried < MAX_TRIED:
            tried += 1
            start = _read_call(text, start, syntax, tools, calls, errors)
        elif tag[0] == syntax.opening:
            errors.append(f"Invalid tool call: only the first {MAX_CALLS} of a turn are read.")
            end = text.find(_THOUGHT, start)
            start = len(text) if end < 0 else end
    content.append(text[start:])
    done = answer_parts is not None and not calls and not errors
    return ParsedTurn(
        thinking="\n".join(t.strip() for t in (text[:continued], *thinking) if t.strip()),
        content="".join(content).strip(),
        tool_calls=tuple(c.call for c in calls),
        errors=tuple(errors),
        final_answer="".join(content[:answer_parts]).strip() if done else None,
        call_ids=tuple(c.call_id for c in calls),
    )


def _read_call(text: str, start: int, syntax: Syntax, tools: Tools, calls: list[WrittenCall], errors: list[str]) -> int:
    """Read the call at ``start`` into ``calls`` or ``errors``; return where the text goes on."""
    try:
        calls.append(syntax.read(text, start, tools))
        return calls[-1].end
    except BadCall as e:
        errors.append(f"Invalid tool call: {e}.")
    edge = syntax.edge.search(text, start)
    if edge is None:
        return len(text)
    return edge.end() if edge[0] == syntax.closing else edge.start()
