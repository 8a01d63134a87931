"""Explanation of refused arguments by a tool's JSON schema. Both are untrusted.

A schema may name addresses to fetch, hold patterns that take exponential time, and refer to itself. No address is
fetched here, patterns are skipped, and the number of checks is bounded; a worker plays hundreds of episodes meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_ARGUMENTS_CHARS = 10_000
MAX_SCHEMA_CHARS = 20_000
MAX_CHECKS = 2_000
"""Keywords of the schema that are applied; each also counts the entries of its value."""
MAX_CHARS = 300
"""Limit of the explanation, which quotes the arguments."""
UNEXPLAINED = "the environment refuses these arguments"
_SKIPPED = frozenset(
    ("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicRef")
)
"""Keywords that take more than linear time, or use others that do."""

Check = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


class _TooMuch(Exception):
    """The schema asks for more than `MAX_CHECKS`."""


def explain(tool: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Describe the schema violation in ``arguments`` that the server refused without giving a reason.

    Args:
        tool: in OpenAI function format.
    """
    from jsonschema.exceptions import best_match
    from referencing import Registry

    try:
        schema = tool["function"]["parameters"]
        if len(json.dumps(arguments)) > MAX_ARGUMENTS_CHARS or len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
            return UNEXPLAINED
        registry: Registry[Any] = Registry()
        error = best_match(_validator()(schema, registry=registry).iter_errors(arguments))
        if error is None:
            return UNEXPLAINED
        path = error.json_path.removeprefix("$.") + ": " if error.path else ""
        return f"{path}{error.message}"[:MAX_CHARS]
    except Exception:  # an invalid schema makes the validator raise anything
        return UNEXPLAINED


def _validator() -> Any:
    """Return a class of validators that together make `MAX_CHECKS` checks, then raise _TooMuch."""
    import attrs
    from jsonschema import Draft202012Validator, validators

    left = MAX_CHECKS

    def bounded(keyword: str, check: Check) -> Check:
        def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any] | None:
            nonlocal left
            left -= 1 + (len(value) if isinstance(value, list | dict) else 0)
            if left < 0:
                raise _TooMuch
            if keyword in ("const", "enum") and isinstance(instance, list | dict):
                return None
            if keyword == "additionalProperties" and "patternProperties" in schema:
                return None
            return check(validator, value, instance, schema)

        return checked

    known = Draft202012Validator.VALIDATORS.items()
    checks = {keyword: bounded(keyword, check) for keyword, check in known if keyword not in _SKIPPED}
    made = validators.create(meta_schema=Draft202012Validator.META_SCHEMA, validators=checks)
    # The library's own changes to the class of any part of a schema that names a dialect, and to one with all checks.
    made.evolve = attrs.evolve  # type: ignore[method-assign]
    return made
