"""Frames between processes: bytes of a peer, what an engine is asked and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from fuzz.engine import Surface
from fuzz.trees import Deep, Many, Raw, Special, value_of

from megatron_fleet.agents.token_engine import EngineLost, Generation, SamplingParams
from megatron_fleet.cluster import frames, handshake
from megatron_fleet.rollout.engine_client import EnginePool
from megatron_fleet.rollout.engine_server import EngineServer

IDS = frames.array_to_plain(np.array([1, 2, 3], np.int32))
LOGPROBS = frames.array_to_plain(np.array([-0.5, -1.0, -2.0], np.float32))
ROUTING = frames.array_to_plain(np.zeros((2, 1, 2), np.uint8))
DONE = ["done", 0, IDS, LOGPROBS, "stop", [[0, 0, 3]], ROUTING]
ASKED = ["generate", 0, "session", IDS, 1.0, 5, [7], 3, None, []]


def seeds() -> list[Any]:
    return [
        {"asked": [["image", "image/png", b"x"], ASKED, ["cancel", 0]]},
        {"asked": [ASKED, [*ASKED[:1], 1, *ASKED[2:]]]},
        {"dialled": [["hello", b"x" * 32], ["client", b"y" * 32]]},
        {"listened": [["hello", b"x" * 32, b"y" * 32]]},
        {"answered": [DONE]},
        {"answered": [["refused", 0, "too long"]]},
        {"answered": [["lost", 0, "died"], DONE]},
        {"answered": [[*DONE[:6], None]]},
        {"bytes": frames.pack("join", {"host": "a"}, [1.5, None, True])},
        {"bytes": frames.pack("done", 0, np.arange(6).reshape(2, 3))},
    ]


def check(tree: Any, folder: Path) -> bool:
    tree = tree if isinstance(tree, dict) else {}
    if isinstance(tree.get("bytes"), bytes):
        return asyncio.run(_read(tree["bytes"]))
    for name, play in (("asked", _asked), ("dialled", _dialled), ("listened", _listened)):
        if name in tree:
            return asyncio.run(play(_stream(tree[name])))
    return asyncio.run(_answered(_stream(tree.get("answered"))))


def _stream(items: Any) -> bytes:
    return b"".join(map(_frame, items)) if isinstance(items, list) else b"" if items is None else _frame(items)


def _frame(tree: Any) -> bytes:
    if isinstance(tree, bytes):
        return tree
    try:
        content = msgpack.packb(_packable(tree))
    except (ValueError, OverflowError, TypeError):
        content = b"\xc1"
    return len(content).to_bytes(4, "little") + content


def _packable(tree: Any) -> Any:
    if isinstance(tree, int) and not isinstance(tree, bool):
        return tree % (1 << 64) if tree > 0 else max(tree, -(1 << 63))
    if isinstance(tree, str):
        return tree.encode("utf-8", "replace").decode()
    if isinstance(tree, Deep | Many | Raw | Special):
        return _packable(value_of(tree if not isinstance(tree, Deep) else Deep(min(tree.levels, 400))))
    if isinstance(tree, dict):
        return {_packable(key): _packable(item) for key, item in tree.items()}
    return [_packable(item) for item in tree] if isinstance(tree, list) else tree


def _reader(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def _read(data: bytes) -> bool:
    reader = _reader(data)
    try:
        while (frame := await frames.read(reader)) is not None:
            for item in frame:
                if isinstance(item, list) and len(item) == 3 and isinstance(item[0], str):
                    frames.array_from_plain(item)
    except ValueError:
        return False
    return True


class _Complaints:
    """Errors that an event loop would print for tasks that nobody awaits."""

    def __init__(self) -> None:
        self.found: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(self._add)

    def _add(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if isinstance(context.get("exception"), Exception):
            self.found.append(context["exception"])

    def check(self) -> None:
        for error in self.found:
            raise error


async def _asked(data: bytes) -> bool:
    """An engine's server with a peer that sends this and goes."""

    async def generate(ids: list[int], params: SamplingParams, session: str, images: Any) -> Generation:
        if not isinstance(params.temperature, int | float) or not ids or not isinstance(params.max_tokens, int):
            raise ValueError("refused")
        assert all(type(i) is int for i in ids)
        return Generation(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", ((0, 0, len(ids)),))

    complaints = _Complaints()
    server = EngineServer(generate, "token")
    server.open()
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    asyncio.get_running_loop().call_later(0.001, reader.feed_eof)
    with contextlib.suppress(ValueError):
        await server._obey(reader, _Writer())
    await asyncio.sleep(0)
    complaints.check()
    return True


async def _dialled(data: bytes) -> bool:
    """A listener with a peer that sends this, and cannot know the token."""
    complaints, server = _Complaints(), EngineServer(_nothing, "token")
    await server._serve(_reader(data), _Writer())
    complaints.check()
    return True


async def _nothing(*request: Any) -> Generation:
    raise AssertionError("a peer without the token was served")


async def _listened(data: bytes) -> bool:
    """A dialler whose peer sends this, and cannot know the token."""
    try:
        await handshake.dial(_reader(data), _Writer(), "token")
    except handshake.NotOfThisRun:
        return True
    raise AssertionError("a peer without the token was believed")


class _Writer:
    """Writer of a connection whose peer only sends."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    def is_closing(self) -> bool:
        return False


async def _answered(data: bytes) -> bool:
    """An engine's client whose engine answers a request with this."""
    complaints = _Complaints()
    reader = _reader(data)
    pool = EnginePool(["127.0.0.1:1"], "token", 60.0, "")
    (replica,) = pool._replicas

    async def connected() -> Any:
        writer = _Writer()
        if not replica._tasks:
            watching = asyncio.create_task(asyncio.Event().wait())
            replica._tasks = (asyncio.create_task(replica._read(reader, writer, watching)),)
        return writer

    replica._connected = connected  # type: ignore[method-assign]
    try:
        generation = await pool.generate([1, 2], SamplingParams(1.0, 5, (7,)), "session")
        assert isinstance(generation.token_ids, np.ndarray) and isinstance(generation.logprobs, np.ndarray)
    except (EngineLost, ValueError) as error:
        assert isinstance(str(error), str)
    await asyncio.gather(*replica._tasks, return_exceptions=False)
    complaints.check()
    return True


SURFACE = Surface(
    "frames", 2000, seeds, check, words=("hello", "generate", "image", "cancel", "done", "lost", "refused")
)
