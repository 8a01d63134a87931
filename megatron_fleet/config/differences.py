"""Settings that differ between two resolved configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OWN_TO_A_RUN = frozenset({"run.id", "run.out"})
"""Keys whose values say nothing about how two runs differ."""


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return dotted keys with other values, sorted, and both values; ``None`` where a configuration has no such key."""
    first, second = (dict(flat(tree)) for tree in (one, other))
    keys = sorted((first.keys() | second.keys()) - OWN_TO_A_RUN)
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every setting of a configuration."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
