"""The engine protocol: length-prefixed msgpack frames over one persistent TCP connection.

Frames are lists whose first item is the kind. Client to engine, the first frame being ``hello``::

    ["hello", token]
    ["image", media type, file]     requests name it by its digest afterwards
    ["generate", id, session, prompt ids, temperature, max_tokens, stop ids, seed, routing_start,
     [[start, end, digest], ...]]   the last: the pictures in the prompt, each over its placeholders
    ["cancel", id]

Engine to client, in any order of ``id``::

    ["done", id, token ids, logprobs, finish_reason, [[version, start, end], ...], routing]
    ["missing", id]             the engine does not hold all pictures of the request (any more): send both again
    ["refused", id, reason]     the request can never be served
    ["lost", id, reason]        the engine cannot serve any more

Token ids travel as little-endian int32 bytes, log-probs as float32 bytes, routing as ``[type, layers, k, bytes]`` or
nil. A picture is in every later prompt of its episode, so its file travels once. msgpack and not pickle: a frame from a
peer is data, never code.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np

_LENGTH = struct.Struct("<I")
MAX_FRAME = 512 << 20
"""Bytes; a longer frame is a broken or foreign peer. 256 Ki tokens of a model with 61 layers and 8 of 384 experts."""


def pack(*frame: Any) -> bytes:
    body = msgpack.packb(frame)
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> list[Any] | None:
    """Next frame, ``None`` at the end of the stream. Raises ValueError for bytes that are no frame."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME:
            raise ValueError(f"frame of {length} bytes; the limit is {MAX_FRAME}")
        frame = msgpack.unpackb(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except msgpack.UnpackException as error:
        raise ValueError("bytes that are no msgpack") from error
    if not isinstance(frame, list) or not frame:
        raise ValueError("a frame must be a non-empty list")
    return frame


def ids_to_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def bytes_to_ids(raw: bytes) -> np.ndarray:
    """int32 ``[N]``, writable."""
    return np.frombuffer(raw, dtype="<i4").astype(np.int32)


def floats_to_bytes(values: Sequence[float] | np.ndarray) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def bytes_to_floats(raw: bytes) -> np.ndarray:
    """float32 ``[N]``, writable."""
    return np.frombuffer(raw, dtype="<f4").astype(np.float32)


def routing_to_list(routing: np.ndarray | None) -> list[Any] | None:
    """uint8 or int16 ``[R, layers, k]`` as a part of a frame."""
    if routing is None:
        return None
    kind = {"uint8": "|u1", "int16": "<i2"}[routing.dtype.name]
    return [kind, *routing.shape[1:], routing.astype(kind, copy=False).tobytes()]


def list_to_routing(part: list[Any] | None) -> np.ndarray | None:
    """What `routing_to_list` was given, read-only."""
    if part is None:
        return None
    kind, layers, experts, raw = part
    return np.frombuffer(raw, dtype=kind).reshape(-1, layers, experts)
