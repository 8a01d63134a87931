"""Strict reader of the JSON in a policy's tool calls; errors become sentences for the policy."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from megatron_fleet.config.files import depth_exceeds
from megatron_fleet.models.chat.parser import BadCall

MAX_DEPTH = 100
"""Nesting limit of objects and lists; deeper values would cause a RecursionError here or in an environment."""
_FENCE_OPEN = re.compile(r"\s*(?:```(?:json)?\s*)?")
_FENCE_CLOSE = re.compile(r"\s*(?:```\s*)?")


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
    """Arguments of a call, given as an object or as a string that holds one. Raises BadCall."""
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
