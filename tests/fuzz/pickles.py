"""Pickles and the archives of ``torch.save`` as trees, so that what they hold can be changed and still be whole.

A pickle's own kinds of values are dicts with one key: ``$tuple``, ``$set``, ``$dict`` (pairs, for keys that are no
text), ``$name`` (of a class or function), ``$call`` (name, arguments, state) and ``$persistent``.
"""

from __future__ import annotations

import struct
from typing import Any

from fuzz.trees import Deep, Many, Raw, Special, value_of
from megatron_fleet.weights.torch_dist import archive
from megatron_fleet.weights.torch_dist import pickle_writer as emit
from megatron_fleet.weights.torch_dist.pickle_reader import Global, Opaque


def to_tree(value: Any) -> Any:
    """The tree of what `pickle_reader.unpickle` gave."""
    if isinstance(value, Opaque):
        return {"$call": [value.name, to_tree(value.args), to_tree(value.state)]}
    if isinstance(value, Global):
        return {"$name": str(value)}
    if isinstance(value, tuple):
        return {"$tuple": [to_tree(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"$set": [to_tree(item) for item in value]}
    if isinstance(value, list):
        return [to_tree(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {key: to_tree(item) for key, item in value.items()}
        return {"$dict": [[to_tree(key), to_tree(item)] for key, item in value.items()]}
    return value


def pickled(tree: Any) -> bytes:
    """The pickle of a tree."""
    return emit.PROTO + _emitted(tree) + emit.STOP


def archived(tree: Any, data_bytes: int | None = None) -> bytes:
    """The archive of ``torch.save`` with this pickle, and a storage of zeros."""
    before, after = archive.pack(pickled(tree), data_bytes)
    return before + bytes(data_bytes or 0) + after


def _emitted(tree: Any) -> bytes:
    if isinstance(tree, dict):
        if len(tree) == 1 and (special := _KINDS.get(next(iter(tree)))) is not None:
            (content,) = tree.values()
            made = special(content)
            if made is not None:
                return made
        return _dict([(_text(str(key)), _emitted(item)) for key, item in tree.items()])
    if isinstance(tree, list):
        return emit.EMPTY_LIST + emit.MARK + b"".join(map(_emitted, tree)) + emit.APPENDS
    if isinstance(tree, Deep):
        return emit.NONE + emit.TUPLE_1 * tree.levels
    if isinstance(tree, Raw):
        return _text(tree.text)
    if isinstance(tree, Special | Many):
        return _text(value_of(tree))
    if isinstance(tree, bytes):
        return b"B" + struct.pack("<I", len(tree)) + tree
    if isinstance(tree, str):
        return _text(tree)
    if isinstance(tree, float):
        return b"G" + struct.pack(">d", tree)
    if tree is None or isinstance(tree, bool):
        return {None: emit.NONE, True: b"\x88", False: emit.FALSE}[tree]
    if abs(tree) < 1 << 2000:
        return emit.integer(tree)
    raw = tree.to_bytes(tree.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<I", len(raw)) + raw


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _dict(items: list[tuple[bytes, bytes]]) -> bytes:
    return emit.EMPTY_DICT + emit.MARK + b"".join(key + item for key, item in items) + emit.SETITEMS


def _tuple(content: Any) -> bytes | None:
    return emit.MARK + b"".join(map(_emitted, content)) + emit.TUPLE if isinstance(content, list) else None


def _set(content: Any) -> bytes | None:
    items = b"".join(map(_emitted, content)) if isinstance(content, list) else None
    return None if items is None else b"\x8f" + emit.MARK + items + b"\x90"


def _pairs(content: Any) -> bytes | None:
    pairs = content if isinstance(content, list) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return None
    return _dict([(_emitted(key), _emitted(item)) for key, item in pairs])


def _name(content: Any) -> bytes | None:
    module, dot, name = content.rpartition(".") if isinstance(content, str) else ("", "", "")
    return emit.named(module, name) if dot and content.isascii() and content.isprintable() else None


def _call(content: Any) -> bytes | None:
    if not isinstance(content, list) or len(content) != 3:
        return None
    name, arguments, state = content
    if name == "persistent":
        return _emitted(arguments) + emit.PERSISTENT_ID
    named = _name(name)
    if named is None:
        return None
    made = named + _emitted(arguments) + emit.REDUCE
    return made if state is None else made + _emitted(state) + emit.BUILD


_KINDS = {"$tuple": _tuple, "$set": _set, "$dict": _pairs, "$name": _name, "$call": _call}
