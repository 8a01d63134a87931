"""Arguments that a policy writes as untyped text; the tool's schema determines their types."""

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
"""Python literals that some templates write; each is a value where the schema allows its type."""


def declared_properties(name: str, tools: Tools) -> Mapping[str, Any]:
    """Schemas of a tool's arguments by name; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def _declared(schema: Any) -> set[str]:
    """JSON types that a schema allows; empty if it does not say."""
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
    """Interpret ``written`` by its schema: as JSON of a declared type (any, if none is declared), otherwise as text.

    Args:
        python_words: also accept ``True``, ``False`` and ``None`` where the schema allows their type.

    Raises:
        BadCall: it has to be JSON, but is malformed.
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
