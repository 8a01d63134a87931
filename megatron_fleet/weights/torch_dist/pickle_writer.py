"""The few pickle opcodes (protocol 2) needed for a checkpoint's files, without importing the classes they name."""

from __future__ import annotations

import struct
from collections.abc import Sequence

PROTO = b"\x80\x02"
STOP = b"."
MARK = b"("
POP = b"0"
NONE = b"N"
FALSE = b"\x89"
EMPTY_DICT = b"}"
EMPTY_LIST = b"]"
EMPTY_TUPLE = b")"
TUPLE = b"t"
TUPLE_1 = b"\x85"
APPENDS = b"e"
SETITEMS = b"u"
NEWOBJ = b"\x81"
REDUCE = b"R"
BUILD = b"b"
PERSISTENT_ID = b"Q"
_TUPLES = (EMPTY_TUPLE, TUPLE_1, b"\x86", b"\x87")


def integer(value: int) -> bytes:
    """An int of up to 255 bytes."""
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def text(value: str) -> bytes:
    """A str."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def integers(values: Sequence[int]) -> bytes:
    """A tuple of ints."""
    parts = b"".join(map(integer, values))
    return parts + _TUPLES[len(values)] if len(values) <= 3 else MARK + parts + TUPLE


def named(module: str, name: str) -> bytes:
    """A class or function."""
    return f"c{module}\n{name}\n".encode()


def put(index: int) -> bytes:
    """Memoise the top of the stack under ``index``; indices count up from 0."""
    return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    """Push a memoised value."""
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
