"""Messages between processes: length-prefixed msgpack frames over TCP.

A frame is a non-empty list whose first item is its kind. msgpack and not pickle: a frame from a peer is data, never
code. Arrays travel as ``[dtype, shape, bytes]``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np

_LENGTH = struct.Struct("<I")
_BIN32 = struct.Struct(">I")
"""msgpack: the length behind the byte 0xC6 of binary data."""
MAX_FRAME = 2 << 30
"""Bytes; a longer frame is a broken or foreign peer. 1 Mi tokens of a model with 61 layers and 8 of 384 experts."""
MAX_HELLO = 1 << 16
"""Bytes of the first frame of a peer, which has not shown the run's token yet."""
KEEPALIVE_S = (5, 1, 3)
"""Seconds until the first probe of a silent peer, between probes, and probes without an answer that end a connection:
a host that vanished is noticed within 8 seconds. The end of a process is noticed at once."""


def body(*frame: Any) -> bytes:
    """The bytes of one frame, without their length; `unpack` reads them.

    Items: what msgpack knows, numpy arrays and numbers among it.
    """
    return msgpack.packb(frame, default=_plain)


def pack(*frame: Any) -> bytes:
    """The bytes of one frame."""
    content = body(*frame)
    return _LENGTH.pack(len(content)) + content


def pack_around(kind: str, number: int, content: bytes) -> tuple[bytes, bytes]:
    """The frame ``[kind, number, content]`` in two parts, so that large content is not copied."""
    head = msgpack.Packer()
    text = head.pack_array_header(3) + head.pack(kind) + head.pack(number) + b"\xc6" + _BIN32.pack(len(content))
    return _LENGTH.pack(_checked(len(text) + len(content))) + text, content


def unpack(body: bytes | bytearray) -> list[Any]:
    """A frame from the bytes behind its length. Raises ValueError for bytes that are no frame."""
    try:
        frame = msgpack.unpackb(body, strict_map_key=False, max_bin_len=MAX_FRAME)
    except (msgpack.UnpackException, ValueError, TypeError) as error:  # TypeError: a key that is a list
        raise ValueError("bytes that are no msgpack") from error
    if not isinstance(frame, list) or not frame:
        raise ValueError("a frame must be a non-empty list")
    return frame


async def read(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME) -> list[Any] | None:
    """Next frame, ``None`` at the end of the stream. Raises ValueError for bytes that are no frame, or too many."""
    try:
        length = _checked(_LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0], max_bytes)
        return unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None


class FrameSocket:
    """A blocking connection. One thread reads; any thread may write."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writing = threading.Lock()
        keep_alive(connection)

    def write(self, *frame: Any) -> None:
        """Send one frame. Raises OSError when the peer is gone."""
        data = pack(*frame)
        with self._writing:
            self._connection.sendall(data)

    def read(self) -> list[Any] | None:
        """Next frame, ``None`` at the end of the stream. Raises ValueError for bytes that are no frame."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        body = self._exactly(_checked(_LENGTH.unpack(head)[0]))
        return None if body is None else unpack(body)

    def close(self) -> None:
        """End the connection in both directions."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _exactly(self, count: int) -> bytearray | None:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            try:
                received = self._connection.recv_into(view[done:])
            except OSError:
                return None
            if received == 0:
                return None
            done += received
        return data


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end the connection when the peer's host has vanished; small frames leave at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, interval, count = KEEPALIVE_S
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    # Unanswered data ends it too; keep-alive probes are not sent while data is on its way.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (idle + interval * count) * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def array_to_plain(array: np.ndarray) -> list[Any]:
    """``[dtype, shape, bytes]``, little-endian."""
    little = array.dtype.newbyteorder("<")
    return [little.str, list(array.shape), np.ascontiguousarray(array, little).tobytes()]


def array_from_plain(value: list[Any]) -> np.ndarray:
    """Read the array that `array_to_plain` wrote; it is read-only. Raises ValueError for anything else."""
    try:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    except (TypeError, OverflowError, SyntaxError) as error:  # SyntaxError: a text that is no dtype
        raise ValueError("a value that is no array") from error


def _checked(length: int, limit: int = MAX_FRAME) -> int:
    if length > limit:
        raise ValueError(f"frame of {length} bytes; the limit is {limit}")
    return length


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return array_to_plain(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be part of a frame")
