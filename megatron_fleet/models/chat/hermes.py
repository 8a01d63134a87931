"""Tool calls as a JSON object in ``<tool_call>``: Qwen 2.5, Qwen 3, Hermes."""

from __future__ import annotations

import re

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.parser import BadCall, Syntax, Tools, WrittenCall
from megatron_fleet.models.chat.strict_json import check_text, read_arguments, read_value

_CLOSE = re.compile(r"</tool_call>|\Z")


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    value, end = read_value(text, start)
    close = _CLOSE.match(text, end)
    if close is None:
        raise BadCall("there is text between the JSON object and </tool_call>")
    if not isinstance(value, dict):
        raise BadCall('the JSON must be an object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadCall('"name" is missing')
    if "arguments" not in value:
        raise BadCall('"arguments" is missing')
    arguments = read_arguments(value["arguments"])
    check_text(name, arguments)
    return WrittenCall(ToolCall(name.strip(), arguments), "", close.end())


HERMES = Syntax("<tool_call>", "</tool_call>", _read)
