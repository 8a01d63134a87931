"""Client of the engine protocol, see ``engine_server.py``. Imports neither vLLM nor torch."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_fleet.agents.settings import stable_seed
from megatron_fleet.agents.token_engine import EngineLost, EngineRefused, Generation, SamplingParams
from megatron_fleet.cluster import frames, handshake
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.platform.deadlines import DeadlineClock

MAX_SESSIONS = 65_536
"""Remembered session-to-replica assignments; forgetting one only costs a prefix-cache miss."""
FAR_REQUESTS = 8
"""Extra requests in flight counted for a replica on another host, if this host has replicas of its own."""
HEALTH_SHARE = 0.25
"""Part of the time that an engine has to answer a health question after which the next one is asked."""
MAX_SENT = 65_536
"""Remembered images that were sent to an engine; forgetting one only costs sending it again."""


def connect(endpoints: Sequence[str], token: str, health_timeout_s: float, host: str = "") -> EnginePool:
    """Return an Engine over the replicas at ``endpoints`` (``host:port``). Connects on first use, from any event loop.

    A request has no deadline here: the engine ends it at its own (`EngineConfig.turn_timeout_s`).

    Args:
        token: the run's secret; an engine closes the connection without it.
        health_timeout_s: an engine is lost when it does not answer a connection or a health question in this time.
        host: address of this host; its replicas, if any, are preferred.
    """
    return EnginePool(endpoints, token, health_timeout_s, host)


class EnginePool:
    """Replicas with sticky sessions: a new session goes to the least loaded replica (ties by a stable hash).

    A replica on another host counts as more loaded than it is, so it only gets the overflow of local replicas.
    """

    def __init__(self, endpoints: Sequence[str], token: str, health_timeout_s: float, host: str) -> None:
        """See `connect`."""
        self._token, self._health_timeout_s, self._host = token, health_timeout_s, host
        self._replicas: list[_Replica] = []
        self._leaving: list[_Replica] = []
        self._there = asyncio.Event()
        self._sessions: OrderedDict[str, _Replica] = OrderedDict()
        for endpoint in endpoints:
            self._add(endpoint)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, session: str, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        """Sample one turn (see ``agents.token_engine.Engine``).

        If the engine goes to sleep meanwhile, the rest is sampled when it is awake again, with the weights that it has
        then and a seed of its own; the episode's deadline stands still until then. If it leaves, or all have left, the
        rest is sampled by another one.

        Raises:
            EngineLost: the replica is gone, or does not answer a health question.
            EngineRefused: the engine refuses the request (for example a prompt beyond its context).
        """
        ids = np.asarray(prompt_ids, np.int32)
        parts: list[Generation] = []
        while True:
            await self._until_there()
            replica = self._replica_of(session)
            part = await replica.sample(ids, _rest(params, parts), session, images)
            parts.append(part)
            if part.finish_reason != "interrupted":
                return _joined(parts, len(prompt_ids))
            ids = np.concatenate([ids, part.token_ids])

    def moved(self, before: str, now: str) -> None:
        """Replace the endpoint of a replica that was lost and restarted; ``before=""``: it is a further replica.
        ``now=""``: it does not come back, and what waits for it is lost."""
        if not before:
            self._add(now)
            return
        for replica in [*self._replicas, *self._leaving]:
            if replica.endpoint != before:
                continue
            if now:
                replica.move(now)
            else:
                self.leaves(before)
                self._leaving.remove(replica)
                replica.cut()

    def leaves(self, endpoint: str) -> None:
        """Send no further requests to a replica, which will interrupt those that it has."""
        self._leaving += [replica for replica in self._replicas if replica.endpoint == endpoint]
        self._replicas = [replica for replica in self._replicas if replica.endpoint != endpoint]
        if not self._replicas:
            self._there.clear()

    def _add(self, endpoint: str) -> None:
        self._replicas.append(_Replica(endpoint, self._token, self._health_timeout_s))
        self._there.set()

    async def _until_there(self) -> None:
        """Wait for a replica; meanwhile the episode's deadline stands still."""
        if self._there.is_set():
            return
        clock = DeadlineClock.current()
        clock.stop()
        try:
            await self._there.wait()
        finally:
            clock.go_on()

    def _replica_of(self, session: str) -> _Replica:
        replica = self._sessions.pop(session, None)
        if replica is None or replica not in self._replicas:
            near = {one for one in self._replicas if one.endpoint.rsplit(":", 1)[0] == self._host}
            start = zlib.crc32(session.encode()) % len(self._replicas)

            def load(one: _Replica) -> int:
                return one.in_flight + (FAR_REQUESTS if near and one not in near else 0)

            replica = min(self._replicas[start:] + self._replicas[:start], key=load)
        self._sessions[session] = replica
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return replica


class _ImagesMissing(EngineRefused):
    """The engine has evicted images of the request that were sent to it."""


class _Replica:
    """One engine: one connection, reopened after a failure, with any number of concurrent requests."""

    def __init__(self, endpoint: str, token: str, health_timeout_s: float):
        self.endpoint = endpoint
        self._token, self._health_timeout_s = token, health_timeout_s
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Generation]] = {}
        self._clocks: dict[int, DeadlineClock] = {}
        self._asleep = False
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._heard = asyncio.Event()
        self._reason = ""
        self._connecting = asyncio.Lock()
        self._sent: OrderedDict[str, None] = OrderedDict()

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def move(self, endpoint: str) -> None:
        """Connect to ``endpoint`` from now on. What waits for the old one, whose host may be gone silently, is lost."""
        self.endpoint = endpoint
        self.cut()

    def cut(self) -> None:
        """Close the connection; what waits for the engine is lost."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def sample(
        self, ids: np.ndarray, params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> Generation:
        """Sample one turn; it ends as ``interrupted`` if the engine goes to sleep, or leaves, meanwhile.

        Args:
            ids: prompt, int32 ``[N]``.
        """
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
        clock = self._clocks[number] = DeadlineClock.current()
        if self._asleep:
            clock.stop()
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
            self._clocks.pop(number).go_on()

    def _sleeps(self, asleep: bool) -> None:
        self._asleep = asleep
        for clock in self._clocks.values():
            if asleep:
                clock.stop()
            else:
                clock.go_on()

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
                try:
                    async with asyncio.timeout(self._health_timeout_s):
                        reader, writer = await self._dial()
                except TimeoutError as error:
                    raise EngineLost(f"engine {self.endpoint} {self._silent()}") from error
                self._writer, self._reason = writer, "closed the connection"
                self._sent.clear()
                watching = asyncio.create_task(self._watch(writer))
                self._tasks = (watching, asyncio.create_task(self._read(reader, writer, watching)))
            return self._writer

    def _silent(self) -> str:
        return f"did not answer within {self._health_timeout_s:g} s (rollout.engine.health_timeout_s)"

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        """Cut a connection over which nothing comes while requests wait, not even the answer to a health question."""
        while True:
            await asyncio.sleep(HEALTH_SHARE * self._health_timeout_s)
            if not self._waiting:
                continue
            self._heard.clear()
            writer.write(frames.pack("health"))
            try:
                async with asyncio.timeout(self._health_timeout_s):
                    await self._heard.wait()
            except TimeoutError:
                self._reason = self._silent()
                writer.transport.abort()
                return

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

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, watching: asyncio.Task[None]
    ) -> None:
        endpoint = self.endpoint
        try:
            while (frame := await frames.read(reader)) is not None:
                self._heard.set()
                match frame:
                    case ["healthy"]:
                        pass
                    case ["asleep", bool(asleep)]:
                        self._sleeps(asleep)
                    case _:
                        self._settle(frame)
        except (ValueError, TypeError, LookupError, OverflowError):
            pass  # a malformed frame is handled like a lost connection
        finally:
            self._writer = None
            self._sleeps(False)
            watching.cancel()
            writer.close()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EngineLost(f"engine {endpoint} {self._reason}"))

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
            answer.set_exception(EngineRefused(rest[0]))


def _rest(params: SamplingParams, parts: Sequence[Generation]) -> SamplingParams:
    """Return the parameters for what ``parts`` of a turn left to sample."""
    if not parts:
        return params
    done = sum(len(part.token_ids) for part in parts)
    routed = sum(len(part.routing) for part in parts if part.routing is not None)
    return replace(
        params,
        max_tokens=params.max_tokens - done,
        # A generator that began again with the same seed would repeat the random numbers of the first part.
        seed=None if params.seed is None else stable_seed(params.seed, len(parts), done),
        routing_start=None if params.routing_start is None else params.routing_start + routed,
    )


def _joined(parts: Sequence[Generation], prompt: int) -> Generation:
    """Join the parts of one turn. ``prompt``: number of tokens of its prompt."""
    if len(parts) == 1:
        return parts[0]
    ends = np.cumsum([len(part.token_ids) for part in parts]).tolist()
    versions = (
        (version, before + start, before + end)
        for part, before in zip(parts, [0, *ends], strict=False)
        for version, start, end in part.versions
        if start < end
    )
    routing = [part.routing for part in parts if part.routing is not None]
    return Generation(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        parts[-1].finish_reason,
        tuple(versions),
        np.concatenate(routing) if routing else None,
        interruptions=len(parts) - 1,
        recomputed=sum(prompt + end for end in ends[:-1]),
    )
