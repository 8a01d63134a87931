"""Messages between ``chat_service`` and its worker process: pickled frames over two private pipes."""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from megatron_fleet.agents.chat_client import Dialect
from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.rollout.requests import CollectResult, Progress

LENGTH = struct.Struct("!i")
"""Length prefix of each frame."""


@dataclass(frozen=True, slots=True)
class Setup:
    """First frame to the process, with dumped sections of the configuration; CollectRequests follow."""

    rollout: dict[str, Any]
    env: dict[str, Any]
    agent: dict[str, Any]
    endpoint: dict[str, Any]
    dialect: Dialect
    env_url: str


@dataclass(frozen=True, slots=True)
class Report:
    """Report of the process on a running collection: its progress, and the episodes ended since the last frame."""

    progress: Progress
    ended: list[Trajectory]


@dataclass(frozen=True, slots=True)
class Ended:
    """Last frame of a collection. ``dead``: reason why the endpoint no longer answers; ``None``: it does."""

    result: CollectResult
    dead: str | None


class Frames:
    """Pickled values over two pipes shared only by this process and its parent."""

    def __init__(
        self, reader: asyncio.StreamReader, source: asyncio.ReadTransport, writer: asyncio.WriteTransport
    ) -> None:
        self._reader, self._source, self._writer = reader, source, writer

    @classmethod
    async def open(cls, source: int, target: int) -> Frames:
        """Open the pipes with these two file descriptors."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb"))
        writer, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(target, "wb"))
        return cls(reader, reading, writer)

    def end(self) -> None:
        """Close the writing side after flushing it."""
        self._writer.close()

    def close(self) -> None:
        """Close both pipes."""
        self._writer.close()
        self._source.close()

    async def read(self) -> Any:
        """Read the next value; ``None`` at the end of the input."""
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            return None

    def write(self, value: Any) -> None:
        data = pickle.dumps(value)
        self._writer.write(LENGTH.pack(len(data)) + data)
