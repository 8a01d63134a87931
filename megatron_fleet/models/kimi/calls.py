"""Tool calls of Kimi K2: an id that contains the tool's name, then its arguments as JSON, between control tokens."""

from __future__ import annotations

import re

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.parser import BadCall, Syntax, Tools, WrittenCall
from megatron_fleet.models.chat.strict_json import check_text, read_arguments, read_value

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_HEAD = re.compile(r"([^<]*)" + re.escape(ARGUMENTS_BEGIN))
_CLOSE = re.compile(re.escape(CALL_END) + rf"|(?={re.escape(SECTION_END)})|\Z")
_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    head = _HEAD.match(text, start)
    if head is None:
        raise BadCall(f"{ARGUMENTS_BEGIN} must follow the call's id")
    call_id = head[1].strip()
    name = _ID.fullmatch(call_id)[1].strip()  # type: ignore[index]  # the pattern matches any text
    if not name:
        raise BadCall("the call's id must be functions.NAME:NUMBER")
    value, end = read_value(text, head.end())
    close = _CLOSE.match(text, end)
    if close is None:
        raise BadCall(f"there is text between the JSON object and {CALL_END}")
    arguments = read_arguments(value)
    check_text(call_id, arguments)
    return WrittenCall(ToolCall(name, arguments), call_id, close.end())


KIMI = Syntax(CALL_BEGIN, CALL_END, _read, around=(SECTION_BEGIN, SECTION_END))
