"""What a sampled turn says: thinking, text, tool calls, final answer. Total: any text gives a ParsedTurn."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from megatron_fleet.envs.base import ToolCall

DONE = "<done>"
MAX_CALLS = 16
"""Calls read in one turn. A policy that repeats itself must not flood its own context with results and errors."""
_TAG = re.compile(r"<think>|</think>|<tool_call>|<done>")
_CALL_EDGE = re.compile(r"</?tool_call>|</think>")
_FENCE_OPEN = re.compile(r"\s*(?:```(?:json)?\s*)?")
_CALL_CLOSE = re.compile(r"\s*(?:```\s*)?(?:</tool_call>|\Z)")


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
    """

    thinking: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    errors: tuple[str, ...]
    final_answer: str | None


class _BadCall(ValueError):
    """The sentence that tells the policy what is wrong with its call."""


def parse_turn(text: str) -> ParsedTurn:
    """Read one turn from left to right; never raises.

    A ``</think>`` without its ``<think>`` makes everything before it thinking (the model continued a block that it
    believed open), and an unclosed ``<think>`` swallows the rest. Tags inside the JSON of a call are data.
    """
    thinking: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    errors: list[str] = []
    answer_parts: int | None = None
    start = continued = 0  # text[:continued] is thinking that was opened before this turn
    while tag := _TAG.search(text, start):
        content.append(text[start : tag.start()])
        start = tag.end()
        if tag[0] == "<think>":
            end = text.find("</think>", start)
            thinking.append(text[start:] if end < 0 else text[start:end])
            start = len(text) if end < 0 else end + len("</think>")
        elif tag[0] == "</think>":
            continued = tag.start()
            thinking, content, calls, errors, answer_parts = [], [], [], [], None
        elif tag[0] == DONE:
            answer_parts = len(content) if answer_parts is None else answer_parts
        elif len(calls) + len(errors) < MAX_CALLS:
            start = _read_call(text, start, calls, errors)
        else:
            errors.append(f"Invalid tool call: only the first {MAX_CALLS} of a turn are read.")
            end = text.find("</think>", start)
            start = len(text) if end < 0 else end
    content.append(text[start:])
    done = answer_parts is not None and not calls and not errors
    return ParsedTurn(
        thinking="\n".join(t.strip() for t in (text[:continued], *thinking) if t.strip()),
        content="".join(content).strip(),
        tool_calls=tuple(calls),
        errors=tuple(errors),
        final_answer="".join(content[:answer_parts]).strip() if done else None,
    )


def _read_call(text: str, start: int, calls: list[ToolCall], errors: list[str]) -> int:
    """Read the call whose JSON starts at ``start`` into ``calls`` or ``errors``; return where the text goes on."""
    begin = _FENCE_OPEN.match(text, start).end()  # type: ignore[union-attr]  # the pattern matches the empty string
    try:
        value, end = _DECODER.raw_decode(text, begin)
        close = _CALL_CLOSE.match(text, end)
        if close is None:
            raise _BadCall("there is text between the JSON object and </tool_call>")
        calls.append(_to_call(value))
        return close.end()
    except _BadCall as e:
        problem = str(e)
    except RecursionError:
        problem = "the JSON is nested too deeply"
    except ValueError as e:  # JSONDecodeError, or an integer of more digits than Python converts
        problem = f"the JSON is malformed ({e.msg})" if isinstance(e, json.JSONDecodeError) else "a number is too large"
    errors.append(f"Invalid tool call: {problem}.")
    edge = _CALL_EDGE.search(text, begin)
    if edge is None:
        return len(text)
    return edge.end() if edge[0] == "</tool_call>" else edge.start()


def _to_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise _BadCall('the JSON must be an object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name.strip():
        raise _BadCall('"name" is missing')
    if "arguments" not in value:
        raise _BadCall('"arguments" is missing')
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        raise _BadCall('"arguments" must be a JSON object')
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _BadCall("a string holds half of a surrogate pair") from None
    return ToolCall(name.strip(), arguments)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _BadCall("a key appears twice in one object")
    return result


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _BadCall("a number is too large")
    return number


def _constant(name: str) -> Any:
    raise _BadCall(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)
