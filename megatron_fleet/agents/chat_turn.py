"""Messages of an OpenAI-compatible endpoint: any turn is parsed, and replies are built.

The format: OpenAI, API reference, "Chat completions"; reasoning under the field names of vLLM and others.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.arguments import check_text, read_arguments
from megatron_fleet.models.chat.parser import (
    MAX_CALLS,
    BadCall,
    ParsedTurn,
    Syntax,
    ToolResult,
    Tools,
    WrittenCall,
    parse_turn,
)
from megatron_fleet.models.chat.renderer import to_json

REASONING = ("reasoning_content", "reasoning")
"""Fields that may hold a turn's reasoning; it is sent back in the same field."""

MAX_NAME = 64
_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_-]")
"""Rule of OpenAI's API for names of tools; others have the same."""


class ToolNames:
    """Names of an environment's tools at an endpoint, which allows fewer characters.

    A name is kept if the endpoint allows it. Otherwise each other character becomes ``_``, and a name that is too long,
    or would then stand for two tools, ends in a digest of the original.

    Attributes:
        tools: the definitions under the endpoint's names.
    """

    def __init__(self, tools: Tools) -> None:
        names = list(dict.fromkeys(str(tool["function"]["name"]) for tool in tools))
        counts = Counter(map(_allowed, names))
        sent = {
            name: allowed if counts[allowed] == 1 or allowed == name else _with_digest(name)
            for name, allowed in zip(names, map(_allowed, names), strict=True)
        }
        self._known = {allowed: name for name, allowed in sent.items()}
        self.tools = tuple(
            {**tool, "function": {**tool["function"], "name": sent[str(tool["function"]["name"])]}} for tool in tools
        )

    def original(self, name: str) -> str:
        """Return the environment's name of the tool that the endpoint calls ``name``."""
        return self._known.get(name, name)


def _allowed(name: str) -> str:
    shown = _FORBIDDEN.sub("_", name) or "unknown"
    return shown if len(shown) <= MAX_NAME else _with_digest(name)


def _with_digest(name: str) -> str:
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{_FORBIDDEN.sub('_', name)[: MAX_NAME - 9]}_{digest}"


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


def read_turn(message: Mapping[str, Any], turn: int, return_reasoning: bool, names: ToolNames) -> ChatTurn:
    """Parse one message; never raises.

    Every call gets an answer, so every call needs a unique id: a missing or duplicate one is replaced by an id made of
    ``turn`` and the call's position. Later requests repeat arguments that are not a JSON object as
    ``{"unreadable": …}``, and names that no tool may have as allowed ones, because some endpoints refuse a history with
    malformed ones. Calls and records have the environment's ``names``.
    """
    content = _text(message.get("content")) or _text(message.get("refusal"))
    field = next((name for name in REASONING if _text(message.get(name))), "")
    reasoning = _text(message.get(field)).strip()
    said = parse_turn(content, _NO_CALLS)
    calls, errors, repeated, written = _Ids(turn), [], [], []
    read: list[tuple[ToolCall, str]] = []
    given = message.get("tool_calls")
    for place, entry in enumerate(given if isinstance(given, list) else []):
        call_id, function = calls.next(entry), _function(entry)
        name, raw = function.get("name"), function.get("arguments")
        try:
            if place >= MAX_CALLS:
                raise BadCall(f"only the first {MAX_CALLS} of a turn are read")
            call = _call(name, raw, names)
        except BadCall as problem:
            errors.append((f"Invalid tool call: {problem}.", call_id))
            arguments: Any = {"unreadable": raw}
            written.append(to_json({"name": name, "arguments": raw}))
        else:
            read.append((call, call_id))
            arguments = call.arguments
            written.append(to_json({"name": call.name, "arguments": arguments}))
        known = {"name": _allowed(str(name or "").strip()), "arguments": to_json(arguments)}
        repeated.append({"id": call_id, "type": "function", "function": known})
    later: dict[str, Any] = {"role": "assistant", "content": content}
    if repeated:
        later |= {"content": content or None, "tool_calls": repeated}
    if return_reasoning and field:
        later[field] = message[field]
    parsed = replace(
        said,
        thinking="\n".join(filter(None, (reasoning, said.thinking))),
        tool_calls=tuple(call for call, _ in read),
        call_ids=tuple(call_id for _, call_id in read),
        errors=tuple(error for error, _ in errors),
        final_answer=None if repeated else said.final_answer,
    )
    parts = [f"<think>\n{reasoning}\n</think>"] if reasoning else []
    parts += [content] if content else []
    parts += [f"<tool_call>\n{line}\n</tool_call>" for line in written]
    return ChatTurn(parsed, tuple(call_id for _, call_id in errors), later, "\n".join(parts))


def answers(turn: ChatTurn, results: Sequence[ToolResult], note: str) -> list[dict[str, Any]]:
    """Build the replies to a turn's calls: a message of role ``tool`` for each, even for an invalid call.

    The role takes text only, so images follow in a user message, each after its label in the results.

    Args:
        note: last line of the results; empty for none.
    """
    ids = iter(turn.error_ids)
    replies = [_tool(result.text, result.call_id or next(ids)) for result in results]
    replies[-1]["content"] += f"\n{note}" if note else ""
    shown = [
        (f"{result.name}: [image {number}]", [image])
        for result in results
        for number, image in enumerate(result.images, 1)
    ]
    return [*replies, user_message(shown)] if shown else replies


def reminder(text: str) -> dict[str, Any]:
    """Build the reply to a turn without calls."""
    return user_message([(text, ())])


def user_message(said: Sequence[tuple[str, Sequence[Image]]]) -> dict[str, Any]:
    """Build a user message of texts, each followed by its images; plain text when there are no images."""
    if not any(images for _, images in said):
        return {"role": "user", "content": "\n".join(text for text, _ in said)}
    parts: list[dict[str, Any]] = []
    for text, images in said:
        parts.append({"type": "text", "text": text})
        parts += [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
    return {"role": "user", "content": parts}


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


def _call(name: Any, raw: Any, names: ToolNames) -> ToolCall:
    """Parse one call. Raises BadCall."""
    if not isinstance(name, str) or not name.strip():
        raise BadCall('"name" is missing')
    arguments = read_arguments(raw)
    check_text(name, arguments)
    return ToolCall(names.original(name.strip()), arguments)


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


def _tool(text: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _url(image: Image) -> str:
    """Encode an image as a data URL (RFC 2397)."""
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
