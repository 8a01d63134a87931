"""Client of the engine protocol, see ``engine_server.py``. Imports neither vLLM nor torch."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fleet.agents.engine import EngineLost, Generation, SamplingParams
from megatron_fleet.cluster import frames, handshake
from megatron_fleet.models.images import PlacedImage

MAX_SESSIONS = 65_536
"""Remembered session-to-replica assignments; forgetting one only costs a prefix-cache miss."""
FAR_REQUESTS = 8
"""Extra requests in flight counted for a replica on another host, if this host has replicas of its own."""
DEADLINE_GRACE_S = 10.0
"""Seconds past the deadline, at which engines end a turn themselves, before an engine without an answer is lost."""
MAX_SENT = 65_536
"""Remembered images that were sent to an engine; forgetting one only costs sending it again."""


def connect(endpoints: Sequence[str], token: str, request_timeout_s: float, host: str = "") -> EnginePool:
    """Return an Engine over the replicas at ``endpoints`` (``host:port``). Connects on first use, from any event loop.

    Args:
        token: the run's secret; an engine closes the connection without it.
        request_timeout_s: deadline of one ``generate``, at which the engine ends the turn.
        host: address of this host; its replicas, if any, are preferred.
    """
    near = [endpoint.rsplit(":", 1)[0] == host for endpoint in endpoints]
    handicaps = [FAR_REQUESTS if any(near) and not is_near else 0 for is_near in near]
    replicas = [_Replica(*where, token) for where in zip(endpoints, handicaps, strict=True)]
    return EnginePool(replicas, request_timeout_s)


class EnginePool:
    """Replicas with sticky sessions: a new session goes to the least loaded replica (ties by a stable hash).

    A replica on another host counts as more loaded than it is, so it only gets the overflow of local replicas.
    """

    def __init__(self, replicas: Sequence[_Replica], request_timeout_s: float):
        self._replicas = list(replicas)
        self._timeout_s = request_timeout_s
        self._sessions: OrderedDict[str, _Replica] = OrderedDict()

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Sample one turn (see ``agents.engine.Engine``).

        Raises:
            EngineLost: no answer or no token in time, or the replica is gone.
            ValueError: the engine refuses the request (for example a prompt beyond its context).
        """
        replica = self._replica_of(session)
        try:
            async with asyncio.timeout(self._timeout_s + DEADLINE_GRACE_S):
                return await replica.generate(prompt_ids, params, session, images)
        except TimeoutError as error:
            raise EngineLost(f"engine {replica.endpoint} gave no answer within {self._timeout_s:g} s") from error

    def moved(self, before: str, now: str) -> None:
        """Replace the endpoint of a replica that was lost and restarted."""
        for replica in self._replicas:
            if replica.endpoint == before:
                replica.endpoint = now

    def _replica_of(self, session: str) -> _Replica:
        replica = self._sessions.pop(session, None)
        if replica is None:
            start = zlib.crc32(session.encode()) % len(self._replicas)
            replica = min(self._replicas[start:] + self._replicas[:start], key=lambda r: r.in_flight + r.handicap)
        self._sessions[session] = replica
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return replica


class _ImagesMissing(ValueError):
    """The engine has evicted images of the request that were sent to it."""


class _Replica:
    """One engine: one connection, reopened after a failure, with any number of concurrent requests."""

    def __init__(self, endpoint: str, handicap: int, token: str):
        self.endpoint, self.handicap = endpoint, handicap
        self._token = token
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Generation]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._sent: OrderedDict[str, None] = OrderedDict()

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> Generation:
        ids = np.asarray(prompt_ids, np.int32)
        sampling = (params.temperature, params.max_tokens, params.stop_token_ids, params.seed, params.routing_start)
        places = [(placed.start, placed.end, placed.digest) for placed in images]
        request = (session, ids, *sampling, places)
        try:
            return await self._ask(request, images)
        except _ImagesMissing:
            for placed in images:
                self._sent.pop(placed.digest, None)
            return await self._ask(request, images)

    async def _ask(self, request: tuple[Any, ...], images: Sequence[PlacedImage]) -> Generation:
        number = next(self._numbers)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer  # before connecting, so that the load counts for the next session
        writer = None
        try:
            writer = await self._connected()
            for placed in images:
                self._send_image(writer, placed)
            writer.write(frames.pack("generate", number, *request))
            return await answer
        except asyncio.CancelledError:
            if writer is not None and not writer.is_closing():
                writer.write(frames.pack("cancel", number))
            raise
        finally:
            self._waiting.pop(number, None)

    def _send_image(self, writer: asyncio.StreamWriter, placed: PlacedImage) -> None:
        if placed.digest not in self._sent:
            writer.write(frames.pack("image", placed.image.media_type, placed.image.data))
        self._sent[placed.digest] = None
        self._sent.move_to_end(placed.digest)
        if len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                reader, writer = await self._dial()
                self._writer = writer
                self._sent.clear()
                self._reading = asyncio.create_task(self._read(reader, writer))
            return self._writer

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self.endpoint.rsplit(":", 1)
        try:
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        except OSError as error:
            raise EngineLost(f"engine {self.endpoint} is not reachable: {error.strerror}") from error
        try:
            writer.write(frames.pack("client", await handshake.dial(reader, writer, self._token)))
        except handshake.NotOfThisRun as error:
            writer.close()
            raise EngineLost(f"engine {self.endpoint} is not reachable: {error}") from error
        except asyncio.CancelledError:
            writer.close()
            raise
        return reader, writer

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (frame := await frames.read(reader)) is not None:
                self._settle(frame)
        except (ValueError, TypeError, LookupError, OverflowError):
            pass  # a malformed frame is handled like a lost connection
        finally:
            self._writer = None
            writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EngineLost(f"engine {self.endpoint} closed the connection"))

    def _settle(self, frame: list) -> None:
        kind, number, *rest = frame
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return  # cancelled in the meantime
        if kind == "done":
            ids, logprobs, reason, versions, routing = rest
            spans = tuple((int(v), int(start), int(end)) for v, start, end in versions)
            arrays = frames.vector_from_plain(ids, np.int32), frames.vector_from_plain(logprobs, np.float32)
            experts = None if routing is None else frames.array_from_plain(routing)
            answer.set_result(Generation(*arrays, reason, spans, experts))
        elif kind == "lost":
            answer.set_exception(EngineLost(rest[0]))
        elif kind == "missing":
            answer.set_exception(_ImagesMissing("the images of this prompt are more than an engine keeps at once"))
        else:
            answer.set_exception(ValueError(rest[0]))
