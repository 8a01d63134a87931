"""Arguments of a policy's tool calls: strict JSON, and untyped text whose type the tool's schema determines.

Errors become sentences for the policy.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from megatron_fleet.config.files import depth_exceeds
from megatron_fleet.models.chat.parser import BadCall, Tools

MAX_DEPTH = 100
"""Nesting limit of objects and lists; deeper values would cause a RecursionError here or in an environment."""
_FENCE_OPEN = re.compile(r"\s*(?:```(?:json)?\s*)?")
_FENCE_CLOSE = re.compile(r"\s*(?:```\s*)?")
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


def read_value(text: str, start: int) -> tuple[Any, int]:
    """Read the JSON value at ``start``, with or without a code fence; return it and the offset after it.

    Raises:
        BadCall: malformed, nested too deeply, a number that Python or JSON cannot hold, a duplicate key in an object.
    """
    begin = _FENCE_OPEN.match(text, start).end()  # type: ignore[union-attr]  # the pattern matches the empty string
    try:
        value, end = _DECODER.raw_decode(text, begin)
        if depth_exceeds(value, MAX_DEPTH):
            raise RecursionError
    except RecursionError:
        raise BadCall(f"the JSON is nested too deeply (more than {MAX_DEPTH} levels)") from None
    except json.JSONDecodeError as e:
        raise BadCall(f"the JSON is malformed ({e.msg})") from None
    except BadCall:
        raise
    except ValueError:  # an integer with more digits than Python converts
        raise BadCall("a number is too large") from None
    return value, _FENCE_CLOSE.match(text, end).end()  # type: ignore[union-attr]


def read_arguments(value: Any) -> dict[str, Any]:
    """Arguments of a call, given as an object or as a string that holds one; null or no text: none. Raises BadCall."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        inner = value
        value, end = read_value(inner, 0)
        if end != len(inner):
            raise BadCall('there is text behind the JSON object in "arguments"')
    if not isinstance(value, dict):
        raise BadCall('"arguments" must be a JSON object')
    return value


def check_text(*values: Any) -> None:
    """Raise BadCall if a string within ``values`` cannot be sent on."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadCall("a string holds half of a surrogate pair") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise BadCall("a key appears twice in one object")
    return result


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise BadCall("a number is too large")
    return number


def _constant(name: str) -> Any:
    raise BadCall(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


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
