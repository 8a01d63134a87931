"""Arguments that a policy writes as text without types; the tool's own schema says what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fleet.models.chat.parser import BadCall, Tools
from megatron_fleet.models.chat.strict_json import read_value

_JSON_TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number", "integer"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
_PYTHON_WORDS: Mapping[str, tuple[str, Any]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}
"""Some templates write values as Python does; where the schema allows the type, its word is the value."""


def declared_properties(name: str, tools: Tools) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by name; nothing for an unknown tool."""
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


def read_argument(written: str, schema: Any, python_words: bool = False) -> Any:
    """What ``written`` means where the schema allows it: JSON of a declared type (any, if none is), else the text.

    Args:
        python_words: ``True``, ``False`` and ``None`` are values, too, where the schema names their type.

    Raises:
        BadCall: it must be JSON, and is broken.
    """
    declared = _declared(schema)
    if python_words and written in _PYTHON_WORDS and _PYTHON_WORDS[written][0] in declared:
        return _PYTHON_WORDS[written][1]
    try:
        value, end = read_value(written, 0)
    except BadCall:
        if declared and "string" not in declared and written.lstrip()[:1] in ("{", "["):
            raise
        return written
    if end != len(written) or ("string" in declared and not _JSON_TYPES.get(type(value), set()) & declared):
        return written
    return value
