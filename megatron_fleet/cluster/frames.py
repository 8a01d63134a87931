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
"""Length of msgpack binary data, after the byte 0xC6."""
MAX_FRAME = 2 << 30
"""Bytes; a longer frame means a broken or foreign peer. Fits 1 Mi tokens at 61 layers with 8 of 384 experts."""
MAX_HELLO = 1 << 16
"""Most bytes of a peer's first frames, before it is authenticated."""
KEEPALIVE_S = (5, 1, 3)
"""Seconds until the first probe of a silent peer, seconds between probes, and unanswered probes that end a connection:
a vanished host is detected within 8 seconds. The end of a process is detected immediately."""


def body(*frame: Any) -> bytes:
    """Return the bytes of one frame without the length prefix, for `unpack`.

    Items may be all msgpack types, numpy arrays and scalars, mappings and sets.
    """
    return msgpack.packb(frame, default=_plain)


def pack(*frame: Any) -> bytes:
    """Return the bytes of one frame with the length prefix."""
    content = body(*frame)
    return _LENGTH.pack(len(content)) + content


def pack_around(kind: str, number: int, content: bytes) -> tuple[bytes, bytes]:
    """Return the frame ``[kind, number, content]`` in two parts, so that large content is not copied."""
    head = msgpack.Packer()
    text = head.pack_array_header(3) + head.pack(kind) + head.pack(number) + b"\xc6" + _BIN32.pack(len(content))
    return _LENGTH.pack(_checked(len(text) + len(content))) + text, content


def unpack(body: bytes | bytearray) -> list[Any]:
    """Parse a frame from the bytes after its length prefix. Raises ValueError for bytes that are no frame."""
    try:
        frame = msgpack.unpackb(body, strict_map_key=False, max_bin_len=MAX_FRAME)
    except (msgpack.UnpackException, ValueError, TypeError) as error:  # TypeError: a key that is a list
        raise ValueError("bytes that are not msgpack") from error
    if not isinstance(frame, list) or not frame:
        raise ValueError("a frame must be a non-empty list")
    return frame


async def read(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME) -> list[Any] | None:
    """Read the next frame; ``None`` at the end of the stream. Raises ValueError for a malformed or too long frame."""
    try:
        length = _checked(_LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0], max_bytes)
        return unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None


class FrameSocket:
    """Blocking connection. One thread reads; any thread may write."""

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
        """Read the next frame; ``None`` at the end of the stream. Raises ValueError for bytes that are no frame."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        body = self._exactly(_checked(_LENGTH.unpack(head)[0]))
        return None if body is None else unpack(body)

    def close(self) -> None:
        """Shut down the connection in both directions."""
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
    """Let the kernel end the connection when the peer's host has vanished, and send small frames immediately."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, interval, count = KEEPALIVE_S
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    # Keep-alive probes are not sent while data is in flight, so unacknowledged data needs its own timeout.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (idle + interval * count) * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def array_to_plain(array: np.ndarray) -> list[Any]:
    """Convert an array to ``[dtype, shape, bytes]``, little-endian."""
    little = array.dtype.newbyteorder("<")
    return [little.str, list(array.shape), np.ascontiguousarray(array, little).tobytes()]


def array_from_plain(value: list[Any]) -> np.ndarray:
    """Invert `array_to_plain`; the array is read-only. Raises ValueError for anything else."""
    try:
        dtype, shape, data = value
        return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
    except (TypeError, OverflowError, SyntaxError) as error:  # SyntaxError: a string that is not a dtype
        raise ValueError("a value that is not an array") from error


def vector_from_plain(value: list[Any], dtype: type[np.generic]) -> np.ndarray:
    """Invert `array_to_plain` for an array ``[N]`` of ``dtype``; writable. Raises ValueError for anything else."""
    array = array_from_plain(value)
    if array.ndim != 1 or array.dtype != dtype:
        raise ValueError(f"an array {array.dtype} {list(array.shape)}; expected {np.dtype(dtype)} [N]")
    return array.copy()


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
