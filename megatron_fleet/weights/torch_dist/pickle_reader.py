"""Pickles as inert data: nothing is imported or called, and memory and time are linear in the bytes read.

The standard library's unpickler can be kept from importing, but its opcodes alone are dangerous: ten bytes make it
allocate a 64 GB memo, and a few dozen make it hash a tuple for years.

Opcodes: the Python library reference, ``pickletools``.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Collection
from typing import Any

_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from
_f64 = struct.Struct(">d").unpack_from

_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
"""Python 2 module names, used by pickles up to protocol 2."""
_LONGEST_KEY = 16
_LARGEST_KEY = 1 << 60


class BadPickle(ValueError):
    """Not a pickle, or one with content that no checkpoint needs. The message follows a file name."""


class Global(str):
    """The dotted name of a class or function; never imported."""

    __slots__ = ()


class Opaque:
    """Unbuilt object of a pickle: ``name`` called with ``args``, then given ``state``."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: Any, state: Any = None) -> None:
        self.name = name
        self.args = args
        self.state = state

    def __repr__(self) -> str:
        return f"Opaque({self.name})"


def unpickle(data: bytes, names: Collection[str]) -> Any:
    """Load a pickle as data: plain values, dicts, lists, tuples; ``Opaque`` in place of every object.

    ``torch.Size`` becomes a tuple, ``OrderedDict`` and ``defaultdict`` a dict; a persistent id becomes an ``Opaque``
    named ``persistent``.

    Args:
        names: packages (``torch``) and single names (``builtins.set``) that the pickle may reference.

    Raises:
        BadPickle: malformed, truncated, or referencing anything else.
    """
    try:
        return _run(data, names)
    except BadPickle:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as e:
        raise BadPickle(f"is not a whole pickle ({type(e).__name__})") from None


def _run(data: bytes, names: Collection[str]) -> Any:
    """Execute the opcodes; the four most common ones come first."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    push = stack.append
    remember = memo.append
    position = 0
    while True:
        op = data[position]
        position += 1
        if op == 0x94:  # MEMOIZE
            remember(stack[-1])
        elif op == 0x6A:  # LONG_BINGET
            push(memo[_u32(data, position)[0]])
            position += 4
        elif op == 0x4B:  # BININT1
            push(data[position])
            position += 1
        elif op == 0x68:  # BINGET
            push(memo[data[position]])
            position += 1
        elif (rearrange := _ON_STACK.get(op)) is not None:
            rearrange(stack, marks)
        elif (read := _OPERANDS.get(op)) is not None:
            value, position = read(data, position)
            push(value)
        elif op == 0x28:  # MARK
            marks.append(len(stack))
        elif op in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            index, width = (data[position], 1) if op == 0x71 else (_u32(data, position)[0], 4)
            position += width
            if index > len(memo):
                raise BadPickle("numbers its objects as no pickler does")
            memo[index : index + 1] = [stack[-1]]
        elif op == 0x63:  # GLOBAL
            first = data.index(b"\n", position)
            second = data.index(b"\n", first + 1)
            push(_named(data[position:first].decode(), data[first + 1 : second].decode(), names))
            position = second + 1
        elif op == 0x93:  # STACK_GLOBAL
            name = stack.pop()
            stack[-1] = _named(stack[-1], name, names)
        elif op == 0x80:  # PROTO
            position += 1
        elif op == 0x95:  # FRAME
            position += 8
        elif op == 0x2E:  # STOP
            return stack.pop()
        else:
            raise BadPickle(f"is not a pickle that torch writes (opcode 0x{op:02x})")


def _named(module: Any, name: Any, names: Collection[str]) -> Global:
    if type(module) is not str or type(name) is not str:
        raise BadPickle("names a class by something else than text")
    module = _RENAMED.get(module, module)
    full = f"{module}.{name}"
    if module.partition(".")[0] not in names and full not in names:
        raise BadPickle(f"asks for {full[:100]!r}, which no checkpoint needs, so do not trust its source")
    return Global(full)


def _counted(head: Callable[..., tuple[int]], width: int, text: bool) -> Callable[[bytes, int], tuple[Any, int]]:
    """Build a reader of a length-prefixed string."""

    def read(data: bytes, position: int) -> tuple[Any, int]:
        start = position + width
        end = start + head(data, position)[0]
        return (data[start:end].decode() if text else data[start:end]), end

    return read


def _long(head: Callable[..., tuple[int]], width: int) -> Callable[[bytes, int], tuple[int, int]]:
    def read(data: bytes, position: int) -> tuple[int, int]:
        start = position + width
        end = start + head(data, position)[0]
        return int.from_bytes(data[start:end], "little", signed=True), end

    return read


def _byte(data: bytes, position: int) -> tuple[int]:
    return (data[position],)


_OPERANDS: dict[int, Callable[[bytes, int], tuple[Any, int]]] = {
    pickle.BININT[0]: lambda data, at: (_i32(data, at)[0], at + 4),
    pickle.BININT2[0]: lambda data, at: (_u16(data, at)[0], at + 2),
    pickle.BINFLOAT[0]: lambda data, at: (_f64(data, at)[0], at + 8),
    pickle.LONG1[0]: _long(_byte, 1),
    pickle.LONG4[0]: _long(_u32, 4),
    pickle.SHORT_BINUNICODE[0]: _counted(_byte, 1, text=True),
    pickle.BINUNICODE[0]: _counted(_u32, 4, text=True),
    pickle.BINUNICODE8[0]: _counted(_u64, 8, text=True),
    pickle.SHORT_BINBYTES[0]: _counted(_byte, 1, text=False),
    pickle.BINBYTES[0]: _counted(_u32, 4, text=False),
    pickle.BINBYTES8[0]: _counted(_u64, 8, text=False),
    pickle.BYTEARRAY8[0]: _counted(_u64, 8, text=False),
}


def _since_mark(stack: list[Any], marks: list[int]) -> list[Any]:
    mark = marks.pop()
    items = stack[mark:]
    del stack[mark:]
    return items


def _tuple_of(count: int) -> Callable[[list[Any], list[int]], None]:
    def build(stack: list[Any], marks: list[int]) -> None:
        if len(stack) < count:
            raise BadPickle("is cut off")
        stack[-count:] = [tuple(stack[-count:])]

    return build


def _extend(stack: list[Any], values: list[Any]) -> None:
    target = stack[-1]
    if type(target) is list:
        target.extend(values)
    else:
        raise BadPickle("appends to something else than a list")


def _add(stack: list[Any], values: list[Any]) -> None:
    target = stack[-1]
    if type(target) is not set:
        raise BadPickle("adds to something else than a set")
    target.update(_key(value) for value in values)


def _set_items(stack: list[Any], items: list[Any]) -> None:
    target = stack[-1]
    if type(target) is not dict or len(items) % 2:
        raise BadPickle("sets items of something else than a dict")
    for i in range(0, len(items), 2):
        key = items[i]
        target[key if type(key) is str else _key(key)] = items[i + 1]


def _key(key: Any) -> Any:
    """``key``, if it hashes fast and cannot be made to collide: an ``Opaque`` hashes by identity."""
    if type(key) is tuple and len(key) <= _LONGEST_KEY:
        return tuple(_key(part) for part in key) if not any(type(part) is tuple for part in key) else _bad_key()
    if type(key) in (str, bytes, bool, type(None), Opaque, Global):
        return key
    if type(key) is int and -_LARGEST_KEY < key < _LARGEST_KEY:
        return key
    return _bad_key()


def _bad_key() -> Any:
    raise BadPickle("holds a dict or set with keys that no checkpoint has")


def _build(stack: list[Any], marks: list[int]) -> None:
    state = stack.pop()
    target = stack[-1]
    if type(target) is Opaque:
        target.state = state
    elif type(target) is not dict:
        raise BadPickle("gives a state to a plain value")


def _new(stack: list[Any], marks: list[int]) -> None:
    args = stack.pop()
    name = stack[-1]
    if type(name) is not Global:
        raise BadPickle("calls what has no name")
    stack[-1] = Opaque(name, args)


def _new_with_keywords(stack: list[Any], marks: list[int]) -> None:
    keywords = stack.pop()
    stack[-1] = (stack[-1], keywords)
    _new(stack, marks)


def _reduce(stack: list[Any], marks: list[int]) -> None:
    _new(stack, marks)
    made = stack[-1]
    if made.name == "torch.Size":
        (stack[-1],) = made.args
    elif made.name in ("collections.OrderedDict", "collections.defaultdict"):
        stack[-1] = {}


def _pop_mark(stack: list[Any], marks: list[int]) -> None:
    _since_mark(stack, marks)


_ON_STACK: dict[int, Callable[[list[Any], list[int]], Any]] = {
    pickle.EMPTY_TUPLE[0]: lambda stack, marks: stack.append(()),
    pickle.EMPTY_DICT[0]: lambda stack, marks: stack.append({}),
    pickle.EMPTY_LIST[0]: lambda stack, marks: stack.append([]),
    pickle.EMPTY_SET[0]: lambda stack, marks: stack.append(set()),
    pickle.NONE[0]: lambda stack, marks: stack.append(None),
    pickle.NEWTRUE[0]: lambda stack, marks: stack.append(True),
    pickle.NEWFALSE[0]: lambda stack, marks: stack.append(False),
    pickle.POP[0]: lambda stack, marks: stack.pop(),
    pickle.POP_MARK[0]: _pop_mark,
    pickle.TUPLE1[0]: _tuple_of(1),
    pickle.TUPLE2[0]: _tuple_of(2),
    pickle.TUPLE3[0]: _tuple_of(3),
    pickle.TUPLE[0]: lambda stack, marks: stack.append(tuple(_since_mark(stack, marks))),
    pickle.APPEND[0]: lambda stack, marks: _extend(stack, [stack.pop()]),
    pickle.APPENDS[0]: lambda stack, marks: _extend(stack, _since_mark(stack, marks)),
    pickle.ADDITEMS[0]: lambda stack, marks: _add(stack, _since_mark(stack, marks)),
    pickle.FROZENSET[0]: lambda stack, marks: stack.append(frozenset(map(_key, _since_mark(stack, marks)))),
    pickle.SETITEM[0]: lambda stack, marks: _set_items(stack, [stack.pop(-2), stack.pop()]),
    pickle.SETITEMS[0]: lambda stack, marks: _set_items(stack, _since_mark(stack, marks)),
    pickle.NEWOBJ[0]: _new,
    pickle.NEWOBJ_EX[0]: _new_with_keywords,
    pickle.REDUCE[0]: _reduce,
    pickle.BUILD[0]: _build,
    pickle.BINPERSID[0]: lambda stack, marks: stack.append(Opaque("persistent", stack.pop())),
}
