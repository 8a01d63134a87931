"""Several hosts that run `mfleet doctor`: they meet at MFLEET_CONTROLLER, where one of them asks the others.

Frames of `cluster.frames`, after the hello of `cluster.handshake`. Host to the one that asks::

    ["doctor", proof, host]             the first frame
    ["clock", seconds]                  its time of day
    ["exchanged", speeds]               see `network.exchange`
    ["found", findings]

and back::

    ["clock"]
    ["exchange", what]                  see `network.Exchange`
    ["probe"]
    ["verdict", failed]                 the number of failures on all hosts
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.cluster.inventory import Host
from megatron_fleet.cluster.joined_nodes import host_from_plain, host_to_plain
from megatron_fleet.cluster.rank_identity import controller_address, rank_identity
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import ClusterConfig
from megatron_fleet.doctor import network
from megatron_fleet.doctor.probe import NOT_NEEDED, Finding, Probe, ProbeContext, Result, ask

CLOCK_ROUNDS = 8
DIAL_INTERVAL_S = 0.5
ANSWER_S = 7200.0
"""Deadline of the probes of a host; each has its own."""


def hosts_of(cluster: ClusterConfig | None, environ: Mapping[str, str]) -> tuple[int, bool]:
    """Return how many hosts run this command together, and whether this process is its host's first.

    The number is ``cluster.nodes``, or that of srun or torchrun.
    """
    count, first = (cluster.nodes if cluster is not None else 0), True
    try:
        me = rank_identity(environ)
    except UserError:
        return max(count, 1), True  # nobody started it as one of several
    first = me.local_rank == 0
    return max(count, me.world_size // me.local_world_size), first


class _Link:
    """Connection to another host."""

    def __init__(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host, self._reader, self._writer = host, reader, writer

    async def request(self, kind: str, *content: Any) -> list[Any]:
        """Send a frame and return the answer. Raises ConnectionError."""
        self._writer.write(frames.pack(kind, *content))
        async with asyncio.timeout(ANSWER_S):
            answer = await frames.read(self._reader)
        if answer is None:
            raise ConnectionError("it ended, or its connection broke")
        return answer

    async def offset(self) -> float:
        """Seconds by which its clock is ahead: of several questions, the one that was answered soonest."""
        measured = []
        for _ in range(CLOCK_ROUNDS):
            before = time.time()
            _, there = await self.request("clock")
            after = time.time()
            measured.append((after - before, there - (before + after) / 2))
        return min(measured)[1]

    def send(self, *frame: Any) -> None:
        with suppress(OSError):
            self._writer.write(frames.pack(*frame))

    async def close(self) -> None:
        with suppress(OSError):
            await self._writer.drain()
            self._writer.close()
            await self._writer.wait_closed()


class Meeting:
    """The host that asks: it listens for the others, and collects what was found on all."""

    def __init__(self, here: ProbeContext, probes: Sequence[Probe], hosts: int, timeout_s: float) -> None:
        """Args: ``hosts``: number of hosts, this one included. ``timeout_s``: seconds to wait for them."""
        self._here, self._probes, self._hosts, self._timeout_s = here, probes, hosts, timeout_s
        self._links: dict[str, _Link] = {}
        self._changed, self._begun = asyncio.Event(), False

    async def run(self) -> list[Finding]:
        """Wait for the others, ask all, and return the findings. Raises UserError when the address is taken."""
        address, token = controller_address(self._here.environ)
        host, port = address.rsplit(":", 1)

        async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ValueError, TimeoutError):
                match await handshake.admit(reader, writer, token):
                    case ["doctor", identity] if not self._begun:
                        link = _Link(host_from_plain(identity), reader, writer)
                        self._links[link.host.name] = link
                        self._changed.set()
                        return
            writer.close()

        try:
            server = await asyncio.start_server(admit, host, int(port))
        except OSError as error:
            raise UserError(
                f"MFLEET_CONTROLLER={address} cannot be listened on ({error.strerror}); end the process that uses it, "
                f"or choose another port."
            ) from None
        async with server:
            await self._gather()
            found = await self._ask_all()
            failed = sum(finding.result.status == "failed" for finding in found)
            for link in self._links.values():
                link.send("verdict", failed)
                await link.close()
        return found

    async def _gather(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while len(self._links) < self._hosts - 1:
                    await self._changed.wait()
                    self._changed.clear()
        self._begun = True  # who comes later is sent away

    async def _ask_all(self) -> list[Finding]:
        offsets: dict[str, float] = {}
        for name, link in list(self._links.items()):
            await self._guard(name, self._clock(name, link, offsets))
        mine = self._here.host.name
        found = [self._met(), Finding("clock", mine, network.clock(offsets))]
        found.append(Finding("all-reduce", mine, await self._exchange()))
        answers = await asyncio.gather(
            asyncio.to_thread(ask, self._probes, self._here), *(self._probed(link) for link in self._links.values())
        )
        return [*found, *(finding for findings in answers for finding in findings)]

    def _met(self) -> Finding:
        there = [self._here.host.name, *self._links]
        seen = f"{len(there)} of {self._hosts} have met: {', '.join(there)}"
        good = len(there) == self._hosts
        fix = "start the same command there, with this MFLEET_CONTROLLER and MFLEET_TOKEN, and a name for each host"
        return Finding("hosts", there[0], Result("ok", seen) if good else Result("failed", seen, fix))

    async def _clock(self, name: str, link: _Link, offsets: dict[str, float]) -> None:
        offsets[name] = await link.offset()

    async def _exchange(self) -> Result:
        hosts = [self._here.host, *(link.host for link in self._links.values())]
        counts = [network.processes_of(host, len(hosts)) for host in hosts]
        size = sum(counts)
        if size == 1:
            return Result("skipped", f"{NOT_NEEDED}several processes")
        listener, what = network.open_exchange(hosts[0], size)
        with listener:
            own = asyncio.to_thread(network.exchange, hosts[0], counts[0], what, self._here.environ, listener)
            firsts = [sum(counts[:index]) for index in range(len(hosts))]
            others = [
                self._exchanged(link, asdict(what) | {"first": first}, count)
                for link, first, count in zip(self._links.values(), firsts[1:], counts[1:], strict=True)
            ]
            answers = await asyncio.gather(own, *others)
        return network.judge_exchange({host.name: a for host, a in zip(hosts, answers, strict=True)}, size)

    async def _exchanged(self, link: _Link, what: dict[str, Any], count: int) -> dict[str, float] | str:
        try:
            return (await link.request("exchange", what, count))[1]  # type: ignore[no-any-return]
        except (ConnectionError, TimeoutError) as error:
            return f"lost ({error})"

    async def _probed(self, link: _Link) -> list[Finding]:
        try:
            rows = (await link.request("probe"))[1]
            return [Finding(name, link.host.name, Result(*result), seconds) for name, result, seconds in rows]
        except (ConnectionError, TimeoutError) as error:
            fix = "read the output of `mfleet doctor` there"
            return [Finding("hosts", link.host.name, Result("failed", f"was lost ({error})", fix))]

    async def _guard(self, name: str, work: Any) -> None:
        try:
            await work
        except (ConnectionError, TimeoutError):
            await self._links.pop(name).close()


async def follow(here: ProbeContext, probes: Sequence[Probe], timeout_s: float) -> int:
    """Serve as one of the other hosts; returns the number of failures on all.

    Raises:
        UserError: nobody listens at MFLEET_CONTROLLER, it is another run, or the host that asks is gone.
    """
    address, token = controller_address(here.environ)
    reader, writer = await _dial(address, timeout_s)
    try:
        writer.write(frames.pack("doctor", await handshake.dial(reader, writer, token), host_to_plain(here.host)))
    except handshake.NotOfThisRun as error:
        raise UserError(f"MFLEET_CONTROLLER={address}: {error}; give all hosts the same MFLEET_TOKEN.") from None
    while (frame := await frames.read(reader)) is not None:
        match frame:
            case ["clock"]:
                writer.write(frames.pack("clock", time.time()))
            case ["exchange", dict(plain), int(count)]:
                what = network.Exchange(**plain)
                answer = await asyncio.to_thread(network.exchange, here.host, count, what, here.environ)
                writer.write(frames.pack("exchanged", answer))
            case ["probe"]:
                found = await asyncio.to_thread(ask, probes, here)
                rows = [(f.name, (f.result.status, f.result.detail, f.result.fix), f.seconds) for f in found]
                writer.write(frames.pack("found", rows))
            case ["verdict", int(failed)]:
                writer.close()
                return failed
    raise UserError(f"MFLEET_CONTROLLER={address}: the coordinating host has left; read its output.")


async def _dial(address: str, timeout_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await asyncio.open_connection(host, int(port))
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"MFLEET_CONTROLLER={address}: nobody answered within {timeout_s:g} s ({error}); start `mfleet "
                    f"doctor` there too."
                ) from None
            await asyncio.sleep(DIAL_INTERVAL_S)
