"""Parser for turns from an OpenAI-compatible endpoint. Total: any message is accepted.

The format: OpenAI, API reference, "Chat completions"; reasoning under the field names of vLLM and others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.parser import MAX_CALLS, BadCall, ParsedTurn, Syntax, Tools, WrittenCall, parse_turn
from megatron_fleet.models.chat.renderer import to_json
from megatron_fleet.models.chat.strict_json import check_text, read_arguments

REASONING = ("reasoning_content", "reasoning")
"""Fields that may hold a turn's reasoning; it is sent back in the same field."""


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One assistant turn.

    Attributes:
        parsed: calls, errors and final answer, as for a text turn.
        error_ids: call id for each of ``parsed.errors``.
        message: the turn as later requests repeat it.
        text: the whole turn, for records: thinking in ``<think>``, calls in ``<tool_call>``.
    """

    parsed: ParsedTurn
    error_ids: tuple[str, ...]
    message: dict[str, Any]
    text: str


def read_turn(message: Mapping[str, Any], turn: int, return_reasoning: bool) -> ChatTurn:
    """Parse one message; never raises.

    Every call gets an answer, so every call needs a unique id: a missing or duplicate one is replaced by an id made of
    ``turn`` and the call's position. Later requests repeat arguments that are not a JSON object as
    ``{"unreadable": …}``, because some endpoints refuse a history with malformed ones.
    """
    content = _text(message.get("content")) or _text(message.get("refusal"))
    field = next((name for name in REASONING if _text(message.get(name))), "")
    reasoning = _text(message.get(field)).strip()
    said = parse_turn(content, _NO_CALLS)
    calls, errors, told, written = _Ids(turn), [], [], []
    read: list[tuple[ToolCall, str]] = []
    given = message.get("tool_calls")
    for place, entry in enumerate(given if isinstance(given, list) else []):
        call_id, function = calls.next(entry), _function(entry)
        name, raw = function.get("name"), function.get("arguments")
        try:
            if place >= MAX_CALLS:
                raise BadCall(f"only the first {MAX_CALLS} of a turn are read")
            call = _call(name, raw)
        except BadCall as problem:
            errors.append((f"Invalid tool call: {problem}.", call_id))
            arguments: Any = {"unreadable": raw}
            written.append(to_json({"name": name, "arguments": raw}))
        else:
            read.append((call, call_id))
            arguments = call.arguments
            written.append(to_json({"name": call.name, "arguments": arguments}))
        known = {"name": str(name or "unknown"), "arguments": to_json(arguments)}
        told.append({"id": call_id, "type": "function", "function": known})
    later: dict[str, Any] = {"role": "assistant", "content": content}
    if told:
        later |= {"content": content or None, "tool_calls": told}
    if return_reasoning and field:
        later[field] = message[field]
    parsed = replace(
        said,
        thinking="\n".join(filter(None, (reasoning, said.thinking))),
        tool_calls=tuple(call for call, _ in read),
        call_ids=tuple(call_id for _, call_id in read),
        errors=tuple(error for error, _ in errors),
        final_answer=None if told else said.final_answer,
    )
    parts = [f"<think>\n{reasoning}\n</think>"] if reasoning else []
    parts += [content] if content else []
    parts += [f"<tool_call>\n{line}\n</tool_call>" for line in written]
    return ChatTurn(parsed, tuple(call_id for _, call_id in errors), later, "\n".join(parts))


class _Ids:
    """Unique ids for the calls of one turn."""

    def __init__(self, turn: int) -> None:
        self._turn, self._seen = turn, set[str]()

    def next(self, entry: Any) -> str:
        given = entry.get("id") if isinstance(entry, dict) else None
        call_id = given if isinstance(given, str) else ""
        if not call_id or call_id in self._seen:
            call_id = f"call_{self._turn}_{len(self._seen)}"
        self._seen.add(call_id)
        return call_id


def _function(entry: Any) -> Mapping[str, Any]:
    function = entry.get("function") if isinstance(entry, dict) else None
    return function if isinstance(function, dict) else {}


def _call(name: Any, raw: Any) -> ToolCall:
    """Parse one call. Raises BadCall. A tool without parameters is often called with no arguments, not ``{}``."""
    if not isinstance(name, str) or not name.strip():
        raise BadCall('"name" is missing')
    empty = raw is None or (isinstance(raw, str) and not raw.strip())
    arguments = {} if empty else read_arguments(raw)
    check_text(name, arguments)
    return ToolCall(name.strip(), arguments)


def _text(value: Any) -> str:
    """Return the text of a content field: a string, or the text parts of a list."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _unread(text: str, start: int, tools: Tools) -> WrittenCall:
    raise BadCall("calls are not written into the text")


_NO_CALLS = Syntax("\uffff", "\uffff", _unread)
"""Syntax of text without calls, which arrive in a separate field; U+FFFF is a noncharacter (Unicode 23.7)."""
