"""Tool calls of GLM 4.5 to 4.7: the tool's name, then a key and a value element for each argument.

Strings are written verbatim, everything else as JSON, so the text alone does not distinguish ``"42"`` from ``42``. The
tool's schema decides; where it does not specify a type, anything that parses as JSON is JSON.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.parser import BadCall, Syntax, Tools, WrittenCall
from megatron_fleet.models.chat.strict_json import check_text
from megatron_fleet.models.chat.typed_text import declared_properties, read_argument

_NAME = re.compile(r"\s*([^\s<]+)\s*")
_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_CLOSE = re.compile(r"</tool_call>|\Z")
_SPACE = re.compile(r"\s*")
_VALUE_END = "</arg_value>"


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    name = _NAME.match(text, start)
    if name is None:
        raise BadCall("the tool's name must follow <tool_call>")
    properties = declared_properties(name[1], tools)
    arguments: dict[str, Any] = {}
    end = name.end()
    while key := _KEY.match(text, end):
        close = text.find(_VALUE_END, key.end())
        written = text[key.end() : close]
        if close < 0 or "<arg_value>" in written:
            raise BadCall(f"an <arg_value> is not closed with {_VALUE_END}")
        if key[1].strip() in arguments:
            raise BadCall(f"the argument {key[1].strip()!r} appears twice")
        arguments[key[1].strip()] = read_argument(written, properties.get(key[1].strip()))
        end = _SPACE.match(text, close + len(_VALUE_END)).end()  # type: ignore[union-attr]  # matches the empty string
    closing = _CLOSE.match(text, end)
    if closing is None:
        raise BadCall(
            "each argument must be <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>, and </tool_call> must follow"
        )
    check_text(name[1], arguments)
    return WrittenCall(ToolCall(name[1], arguments), "", closing.end())


GLM = Syntax("<tool_call>", "</tool_call>", _read)
