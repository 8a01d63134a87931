"""Tool calls of GLM 4.5 to 4.7: the tool's name, then a key and a value element for each argument.

A string stands there as it is, everything else as JSON, so the text alone does not tell ``"42"`` from ``42``. The
tool's own schema decides; where it is silent, what reads as JSON is JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_fleet.agents.parser import BadCall, Syntax, Tools, WrittenCall
from megatron_fleet.agents.parsers.strict_json import check_text, read_value
from megatron_fleet.envs.base import ToolCall

_NAME = re.compile(r"\s*([^\s<]+)\s*")
_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_CLOSE = re.compile(r"</tool_call>|\Z")
_SPACE = re.compile(r"\s*")
_VALUE_END = "</arg_value>"
_JSON_TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number", "integer"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    name = _NAME.match(text, start)
    if name is None:
        raise BadCall("the tool's name must follow <tool_call>")
    properties = _properties(name[1], tools)
    arguments: dict[str, Any] = {}
    end = name.end()
    while key := _KEY.match(text, end):
        close = text.find(_VALUE_END, key.end())
        written = text[key.end() : close]
        if close < 0 or "<arg_value>" in written:
            raise BadCall(f"an <arg_value> is not closed with {_VALUE_END}")
        if key[1].strip() in arguments:
            raise BadCall(f"the argument {key[1].strip()!r} appears twice")
        arguments[key[1].strip()] = _value(written, _declared(properties.get(key[1].strip())))
        end = _SPACE.match(text, close + len(_VALUE_END)).end()  # type: ignore[union-attr]  # matches the empty string
    closing = _CLOSE.match(text, end)
    if closing is None:
        raise BadCall(
            "each argument must be <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>, and </tool_call> must follow"
        )
    check_text(name[1], arguments)
    return WrittenCall(ToolCall(name[1], arguments), "", closing.end())


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def _declared(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type")
    found = {types} if isinstance(types, str) else {t for t in _items(schema, "type") if isinstance(t, str)}
    if not found:
        values = [*_items(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
        found = {t for value in values for t in (_JSON_TYPES.get(type(value)) or {"string"})}
    for choice in (*_items(schema, "anyOf"), *_items(schema, "oneOf")):
        found |= _declared(choice)
    return found


def _items(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _value(written: str, declared: set[str]) -> Any:
    """An argument of one of the ``declared`` types (any, if none); text that is no such JSON stays text."""
    try:
        value, end = read_value(written, 0)
    except BadCall:
        if declared and "string" not in declared and written.lstrip()[:1] in ("{", "["):
            raise
        return written
    if end != len(written) or ("string" in declared and not _JSON_TYPES.get(type(value), set()) & declared):
        return written
    return value


GLM = Syntax("<tool_call>", "</tool_call>", _read)
