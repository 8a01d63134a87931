"""Inputs as trees of plain values: what JSON has, bytes, and leaves that stand for what plain values cannot."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[Any, ...]
"""Keys and indices from the root of a tree to a node."""


@dataclass(frozen=True)
class Deep:
    """So many lists within each other."""

    levels: int


@dataclass(frozen=True)
class Raw:
    """JSON text that no value has: a key twice, a number of many digits, no JSON at all."""

    text: str


@dataclass(frozen=True)
class Many:
    """A text so many times."""

    text: str
    times: int


@dataclass(frozen=True)
class Special:
    """In place of a file: ``fifo``, ``folder``, ``loop`` (a link to itself) or ``device``."""

    kind: str


_LEAVES = (Deep, Raw, Many, Special)


def nodes(tree: Any) -> Iterator[tuple[Path, Any]]:
    """Every node of a tree, the root first."""
    pending: list[tuple[Path, Any]] = [((), tree)]
    while pending:
        path, node = pending.pop()
        yield path, node
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        pending += [((*path, key), inner) for key, inner in items]


def replaced(tree: Any, path: Path, new: Any) -> Any:
    """``tree`` with another node at ``path``; what is not on the way there is shared."""
    if not path:
        return new
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], new)
    return copy


def without(tree: Any, path: Path) -> Any:
    """``tree`` without the node at ``path``."""
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(tree[path[0]], path[1:])
    return copy


def value_of(tree: Any) -> Any:
    """The Python value that a program would have of a tree."""
    if isinstance(tree, Deep):
        made: Any = 0
        for _ in range(tree.levels):
            made = [made]
        return made
    if isinstance(tree, Many):
        return tree.text * tree.times
    if isinstance(tree, Raw):
        try:
            return json.loads(tree.text)
        except (ValueError, RecursionError):
            return tree.text
    if isinstance(tree, Special):
        return tree.kind
    if isinstance(tree, dict):
        return {key: value_of(inner) for key, inner in tree.items()}
    return [value_of(inner) for inner in tree] if isinstance(tree, list) else tree


def received(tree: Any) -> Any:
    """Tree as a program reads it from JSON text; ``None`` if it is not one."""
    try:
        return json.loads(json_of(tree))
    except (ValueError, RecursionError):
        return None


def json_of(tree: Any) -> str:
    """A tree as JSON text, with everything in it that makes it none."""
    if isinstance(tree, Deep):
        return "[" * tree.levels + "]" * tree.levels
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Many):
        return json.dumps(tree.text * tree.times)
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {json_of(inner)}" for key, inner in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(json_of, tree)) + "]"
    if isinstance(tree, bytes):
        return json.dumps(tree.decode("latin-1"))
    if isinstance(tree, float) and math.isinf(tree):
        return "1e999" if tree > 0 else "-1e999"
    if isinstance(tree, int) and not isinstance(tree, bool):
        return digits(tree)
    return json.dumps(tree.kind if isinstance(tree, Special) else tree)


def digits(number: int) -> str:
    """An int in decimal digits, also where Python refuses because they are many."""
    return str(number) if abs(number) < 10**4000 else "9" * 5000


def bytes_of(tree: Any) -> bytes:
    """The content of a file: bytes and text as they are, other trees as JSON."""
    if isinstance(tree, bytes):
        return tree
    text = value_of(tree) if isinstance(tree, str | Many) else json_of(tree)
    return text.encode("utf-8", "surrogatepass")


def to_text(tree: Any) -> str:
    """A tree for a file of the corpus; `from_text` reads it."""
    return json.dumps(_tagged(tree)) + "\n"


def from_text(text: str) -> Any:
    """The tree that `to_text` wrote."""
    return _untagged(json.loads(text))


def _tagged(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _tagged(inner) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [_tagged(inner) for inner in tree]
    if isinstance(tree, bytes):
        return {"$bytes": base64.b64encode(tree).decode()}
    if isinstance(tree, int) and not isinstance(tree, bool) and abs(tree) > 1 << 64:
        return {"$int": hex(tree)}
    for kind in _LEAVES:
        if isinstance(tree, kind):
            return {f"${kind.__name__}": list(vars(tree).values())}
    return tree


def _untagged(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_untagged(inner) for inner in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((tag, content),) = tree.items()
        for kind in _LEAVES:
            if tag == f"${kind.__name__}":
                return kind(*content)
        if tag == "$bytes":
            return base64.b64decode(content)
        if tag == "$int":
            return int(content, 16)
    return {key: _untagged(inner) for key, inner in tree.items()}
