"""Controller's connections to the ranks: admission, and calls to all of them with their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.config.errors import UserError
from megatron_fleet.trainer.messages import OTHER, SYSTEM, USER, Identity
from megatron_fleet.weight_sync.base import Deliver

READ_LIMIT = 1 << 20


class RankLink:
    """Connection to one rank, read by `TrainerGroup`."""

    def __init__(self, who: Identity, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.who = who
        self._reader, self._writer = reader, writer

    async def send(self, *frame: Any) -> None:
        """Send one frame and wait until the rank accepts more. The reader of the connection notices when the rank is
        gone.
        """
        await self._write((frames.pack(*frame),))

    async def send_content(self, kind: str, number: int, content: bytes) -> None:
        """Send the frame ``[kind, number, content]``; large content is not copied."""
        await self._write(frames.pack_around(kind, number, content))

    async def _write(self, parts: Sequence[bytes]) -> None:
        with suppress(OSError):
            self._writer.writelines(parts)
            await self._writer.drain()

    async def read(self) -> list[Any] | None:
        """Return the next frame; ``None`` when the rank is gone or its message is invalid."""
        try:
            return await frames.read(self._reader)
        except ValueError:
            return None

    @property
    def gone(self) -> bool:
        """Whether the rank or its connection has ended."""
        return self._writer.is_closing() or self._reader.at_eof()

    def close(self) -> None:
        """Close the connection; the rank then ends by itself. Idempotent."""
        self._writer.close()


Admit = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Handler that takes over a connection: the peer's description of itself, and its streams. Raises ValueError when the
description is invalid.
"""


class RankListener:
    """Listener that ranks connect to. Bound once; ranks of a later attempt connect to the same address."""

    def __init__(self, token: str, config: str | None, world_size: int) -> None:
        """Args: ``config``: resolved, as JSON; sent to every rank. ``None``: ranks wait for `configure`."""
        self._token, self._world_size = token, world_size
        self._config: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        if config is not None:
            self.configure(config)
        self._others: dict[str, Admit] = {}
        self._dialled: dict[int, RankLink] = {}
        self._links: dict[int, RankLink] = {}
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self.address = ""

    def configure(self, config: str) -> None:
        """Set the resolved configuration, as JSON, for the ranks."""
        self._config.set_result(config)

    def admit(self, kind: str, serve: Admit) -> None:
        """Serve peers that are not ranks: those whose first frame is ``[kind, proof, who]``."""
        self._others[kind] = serve

    async def listen(self, host: str, port: int) -> None:
        """Bind; port 0 selects a free one. Raises UserError when binding fails."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=READ_LIMIT, backlog=1024)
        except OSError as error:
            raise UserError(
                f"The controller cannot listen at {host}:{port} ({error.strerror}); free this address."
            ) from None
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def who(self, timeout_s: float) -> list[Identity]:
        """Identities by rank, once all ranks have connected; they still wait for `configure`.

        Raises:
            ConnectionError: timeout, naming the missing ranks.
        """
        links = await self._all(self._dialled, timeout_s, lambda: None)
        return [link.who for link in links]

    async def gather(self, timeout_s: float, failed: Callable[[], str | None]) -> list[RankLink]:
        """Wait until every rank is connected; the caller then owns the connections.

        Args:
            failed: polled; returns the reason to give up, or ``None``.

        Raises:
            ConnectionError: ``failed`` returned a reason, or timeout, naming the missing ranks.
        """
        try:
            return await self._all(self._links, timeout_s, failed)
        except ConnectionError:
            for link in self._links.values():
                link.close()
            raise
        finally:
            self._links = {}

    async def _all(
        self, links: dict[int, RankLink], timeout_s: float, failed: Callable[[], str | None]
    ) -> list[RankLink]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while len(links) < self._world_size:
            if (reason := failed()) is not None:
                raise ConnectionError(reason)
            if asyncio.get_running_loop().time() > deadline:
                missing = sorted(set(range(self._world_size)) - set(links))
                raise ConnectionError(
                    f"{len(missing)} of {self._world_size} ranks did not connect to {self.address} within "
                    f"{timeout_s:g} s (cluster.join_timeout_s), the first is rank {missing[0]}"
                )
            async with self._changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.2)
        return [links[rank] for rank in range(self._world_size)]

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
        for link in (*self._dialled.values(), *self._links.values()):
            link.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames.keep_alive(writer.get_extra_info("socket"))
        try:
            frame = await handshake.admit(reader, writer, self._token)
            if frame is not None and len(frame) == 2:
                kind, who = frame
                await self._admit(kind, who, reader, writer)
                return
        except (TimeoutError, ValueError):
            pass
        writer.close()  # reveal nothing to a peer that does not know the token

    async def _admit(self, kind: str, who: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if kind != "rank":
            if kind not in self._others:
                raise ValueError(f"unknown peer {kind}")
            await self._others[kind](who, reader, writer)
            return
        link = RankLink(Identity.from_plain(who), reader, writer)
        if reason := self._refusal(link.who):
            await link.send("refused", reason)
            link.close()
            return
        await self._keep(self._dialled, link)
        await link.send("config", await asyncio.shield(self._config))
        if self._dialled.get(link.who.rank) is link:
            del self._dialled[link.who.rank]
        await self._keep(self._links, link)

    async def _keep(self, links: dict[int, RankLink], link: RankLink) -> None:
        async with self._changed:
            links[link.who.rank] = link
            self._changed.notify_all()

    def _refusal(self, who: Identity) -> str | None:
        if who.world_size != self._world_size:
            return (
                f"{who.world_size} ranks were started ({who.source}), but parallel.tensor × pipeline × context × data "
                f"needs {self._world_size}; change the launch or the layout."
            )
        if not 0 <= who.rank < self._world_size:
            last = self._world_size - 1
            return f"rank {who.rank} ({who.source}) is out of range, 0 to {last}; fix the launch command."
        there = self._links.get(who.rank) or self._dialled.get(who.rank)
        if there is not None and not there.gone:
            return f"rank {who.rank} ({who.source}) is there already, on host {there.who.host}; start each rank once."
        return None


class Call:
    """One verb on all ranks, collecting their answers."""

    def __init__(self, verb: str, ranks: int, deliver: Deliver | None) -> None:
        self.verb = verb
        self.deliver = deliver
        self._answers: dict[int, Any] = {}
        self._failures: dict[int, tuple[str, str, str]] = {}
        self._ranks = ranks
        self.result: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    def done(self, rank: int, value: Any) -> None:
        """Record a rank's answer."""
        self._answers[rank] = value
        self._settle_when_complete()

    def failed(self, rank: int, kind: str, message: str, name: str) -> None:
        """Record a rank's failure."""
        self._failures[rank] = kind, message, name
        self._settle_when_complete()

    def fail(self, error: BaseException) -> None:
        """Fail the call: no more answers will come."""
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # there may be no waiter

    @property
    def complete(self) -> bool:
        """Whether every rank has answered or failed."""
        return len(self._answers) + len(self._failures) == self._ranks

    def failure(self) -> tuple[str, str] | None:
        """Kind and text of the failure that best explains the others; ``None`` without a failure."""
        for wanted in (USER, OTHER, SYSTEM):
            for rank in sorted(self._failures):
                kind, message, name = self._failures[rank]
                if kind == wanted:
                    return kind, message if kind == USER else f"rank {rank}: {self.verb}: {name}: {message}"
        return None

    def _settle_when_complete(self) -> None:
        if self.complete and not self._failures and not self.result.done():
            self.result.set_result([self._answers[rank] for rank in range(self._ranks)])
