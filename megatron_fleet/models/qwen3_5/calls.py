"""Tool calls of Qwen3.5 and 3.6: one element for the function and one per parameter, values as text."""

from __future__ import annotations

import re
from typing import Any

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.parser import BadCall, Syntax, Tools, WrittenCall
from megatron_fleet.models.chat.strict_json import check_text
from megatron_fleet.models.chat.typed_text import declared_properties, read_argument

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_VALUE_END = "</parameter>"
_SPACE = re.compile(r"\s*")
_CLOSE = re.compile(r"</function>\s*(?:</tool_call>|\Z)")


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    function = _FUNCTION.match(text, start)
    name = function[1].strip() if function else ""
    if function is None or not name:
        raise BadCall("<function=NAME> must follow <tool_call>")
    properties = declared_properties(name, tools)
    arguments: dict[str, Any] = {}
    end = function.end()
    while parameter := _PARAMETER.match(text, end):
        key = parameter[1].strip()
        close = text.find(_VALUE_END, parameter.end())
        written = text[parameter.end() : close].removesuffix("\n")
        if close < 0 or "<parameter=" in written:
            raise BadCall(f"the parameter {key!r} is not closed with {_VALUE_END}")
        if key in arguments:
            raise BadCall(f"the parameter {key!r} appears twice")
        arguments[key] = read_argument(written, properties.get(key), python_words=True)
        end = _SPACE.match(text, close + len(_VALUE_END)).end()  # type: ignore[union-attr]  # matches the empty string
    closing = _CLOSE.match(text, end)
    if closing is None:
        raise BadCall(
            "each argument must be <parameter=NAME>VALUE</parameter>, and </function></tool_call> must follow"
        )
    check_text(name, arguments)
    return WrittenCall(ToolCall(name, arguments), "", closing.end())


QWEN3_5 = Syntax("<tool_call>", "</tool_call>", _read)
