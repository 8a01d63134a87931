"""Controller side of `mfleet node`: the hosts that have joined a run, and the ranks that they start.

Node to controller, as frames of `cluster.frames`, after the hello of `cluster.handshake`::

    ["node", proof, host]                   the first frame; host: see `host_to_plain`
    ["ended", attempt, rank, words]         a rank has ended; words describe how
    ["stopped", attempt]                    no rank is left
    ["left"]                                nothing of Ray is left
    ["leaving"]                             a host with engines only asks for its release
    ["stacks", text]                        see `platform.processes.stacks`

Controller to node::

    ["refused", reason]
    ["welcome", logs, model]                folder of the logs; `model.path`, to be fetched if it is a hub id
    ["join", head]                          see `RayHead`; the controller's own host has Ray already
    ["leave"]
    ["stacks"]
    ["start", attempt, address, ranks]      see `RanksOfHost`
    ["stop", attempt, seconds]              wait this long for the ranks to end, then kill them
    ["quit"]
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_fleet.cluster import frames
from megatron_fleet.cluster.inventory import Device, Host
from megatron_fleet.config.errors import UserError

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""Seconds to wait for a node's report on a rank whose connection has closed."""
OBJECT_STORE_BYTES = 256 << 20
"""Size of Ray's object store on each host; only batches of trajectories pass through it."""
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's default niceness for workers is 15: on busy cores an engine would hardly run at all.
    "RAY_worker_niceness": "0",
    # Ray's monitor kills actors when the host's memory is nearly full, which a checkpoint or an offloaded trainer, not
    # the killed engine, may have filled, and counts what the kernel can free. The kernel's own limit remains.
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Environment variables of Ray's processes on each host."""
STACKS_S = 120.0
"""Seconds that a node has to read the stacks of its processes."""
_NOT_ELASTIC = "--rollout-only needs a run with rollout.engine.replicas=auto and rollout.engine.colocated=false."
ANSWER_S = 15.0
"""Seconds that a node has to answer a request, in addition to the request's own deadline."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """Connection data for a host to join the run's Ray cluster.

    Attributes:
        address: address of the head's control store, ``host:port``.
        trust: environment variables with which Ray's processes authenticate each other.
        folder: folder of Ray's session, the same path on every host.
        run_id: marks the processes, see `cluster.janitor`.
    """

    address: str
    trust: dict[str, str]
    folder: str
    run_id: str


@dataclass(frozen=True, slots=True)
class RanksOfHost:
    """Ranks that one host starts, in the order of their local ranks.

    Attributes:
        threads: CPU threads of each rank.
        visible: CUDA_VISIBLE_DEVICES of all of them; the i-th rank uses the i-th device. ``None``: as inherited.
    """

    ranks: tuple[int, ...]
    world_size: int
    threads: int
    visible: str | None = None


def host_to_plain(host: Host) -> dict[str, Any]:
    """Convert name, address, devices and ``rollout_only`` of a host for a frame."""
    devices = [asdict(device) for device in host.devices]
    return {"name": host.name, "address": host.address, "devices": devices, "rollout_only": host.rollout_only}


def host_from_plain(value: Any) -> Host:
    """Invert `host_to_plain`. Raises ValueError for anything else."""
    try:
        devices = tuple(Device(**device) for device in value["devices"])
        name, address, rollout_only = value["name"], value["address"], value["rollout_only"]
    except (TypeError, KeyError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(name, str) or not isinstance(address, str) or not isinstance(rollout_only, bool):
        raise ValueError("fields of wrong types")
    return Host(name, address, devices, rollout_only=rollout_only)


class _Link:
    """Connection to one node."""

    def __init__(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host, self.reader = host, reader
        self._writer = writer
        self.ended: dict[tuple[int, int], str] = {}
        self.stacks: str | None = None
        self.answers: set[tuple[Any, ...]] = set()
        self.gone = False

    async def send(self, *frame: Any) -> None:
        with suppress(OSError):
            self._writer.write(frames.pack(*frame))
            await self._writer.drain()

    def close(self) -> None:
        self.gone = True
        self._writer.close()


class RolloutHosts(Protocol):
    """What runs engines on hosts that have engines only, and join and leave."""

    async def add_host(self, host: Host) -> None:
        """Start engines on a host that is joining Ray."""
        ...

    async def release_host(self, name: str) -> None:
        """Move the requests of a host's engines to others, because the host leaves; returns when it may."""
        ...

    async def remove_host(self, name: str) -> None:
        """Remove the engines of a host that is lost or has left."""
        ...


class Nodes:
    """Hosts that run `mfleet node`. A lost one may reconnect.

    Attributes:
        rollout_hosts: notified of the hosts with engines only; ``None`` before the rollout starts.
    """

    def __init__(self, count: int, logs: Path, timeout_s: float, model: str = "", elastic: bool = False) -> None:
        """Prepare for nodes.

        Args:
            count: number of nodes that the run waits for; those with engines only do not count.
            timeout_s: seconds to wait for them.
            model: ``model.path``; nodes fetch it if it is a hub id.
            elastic: hosts with engines only are admitted.
        """
        self._count, self._logs, self.timeout_s, self._model = count, logs, timeout_s, model
        self._elastic = elastic
        self.rollout_hosts: RolloutHosts | None = None
        self._changes: set[asyncio.Task[None]] = set()
        self._links: dict[str, _Link] = {}
        self._known: dict[str, Host] = {}
        self._changed = asyncio.Condition()
        self._head: tuple[RayHead, str] | None = None

    async def admit(self, identity: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one node until it leaves. ``identity``: its host as plain data. Raises ValueError if malformed."""
        link = _Link(host_from_plain(identity), reader, writer)
        if reason := self._refusal(link.host):
            await link.send("refused", reason)
            link.close()
            return
        name = link.host.name
        self._links[name] = link
        if not link.host.rollout_only:
            self._known[name] = link.host
        await link.send("welcome", str(self._logs.absolute()), self._model)
        if self._head is not None:
            await self._join(link)
        await self._notify()
        await self._read(link)
        if self._links.get(name) is link:
            del self._links[name]
            if link.host.rollout_only and self.rollout_hosts is not None:
                await self.rollout_hosts.remove_host(name)
        await self._notify()

    async def hosts(self) -> list[Host]:
        """Wait for all hosts to join and return them.

        Raises:
            UserError: some did not connect in time.
        """
        if not await self.wait(lambda: len(self._known) == self._count, self.timeout_s):
            there = ", ".join(self._known) or "none"
            raise UserError(
                f"cluster.nodes={self._count}: {len(self._known)} hosts have joined within {self.timeout_s:g} s "
                f"(cluster.join_timeout_s): {there}; start `mfleet node` on each host, with this run's "
                f"MFLEET_CONTROLLER and MFLEET_TOKEN."
            )
        return list(self._known.values())

    async def join(self, head: RayHead, own: str) -> None:
        """Make all hosts except the controller's, ``own``, join Ray; one that reconnects joins again."""
        self._head = head, own
        await asyncio.gather(*(self._join(link) for link in self._links.values()))

    async def leave(self) -> None:
        """Make all hosts leave Ray; returns when nothing of it is left there, or after ``ANSWER_S``."""
        if self._head is None:
            return
        _, own = self._head
        self._head = None
        links = [link for name, link in self._links.items() if name != own]
        await asyncio.gather(*(link.send("leave") for link in links))
        await self.wait(lambda: all(link.gone or ("left",) in link.answers for link in links), ANSWER_S)

    async def stacks(self, own: str) -> dict[str, str]:
        """Return the stacks of the processes on all hosts except ``own``, by host."""
        links = [link for name, link in self._links.items() if name != own]
        for link in links:
            link.stacks = None
            await link.send("stacks")
        await self.wait(lambda: all(link.gone or link.stacks is not None for link in links), STACKS_S)
        return {link.host.name: link.stacks or f"no answer within {STACKS_S:g} s\n" for link in links}

    async def close(self) -> None:
        """Make all nodes exit."""
        self.rollout_hosts = None
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*(link.send("quit") for link in self._links.values()))
        await self.wait(lambda: not self._links, ANSWER_S)
        for link in self._links.values():
            link.close()

    async def _join(self, link: _Link) -> None:
        assert self._head is not None
        head, own = self._head
        if link.host.name != own:
            await link.send("join", asdict(head))
        if link.host.rollout_only and self.rollout_hosts is not None:
            self._begin(self.rollout_hosts.add_host(link.host))

    async def _release(self, link: _Link) -> None:
        if self.rollout_hosts is not None:
            await self.rollout_hosts.release_host(link.host.name)
        await link.send("quit")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _read(self, link: _Link) -> None:
        with suppress(ValueError):  # a malformed frame is handled like a lost connection
            while (frame := await frames.read(link.reader)) is not None:
                match frame:
                    case ["ended", int(attempt), int(rank), str(words)]:
                        link.ended[attempt, rank] = words
                    case ["stacks", str(text)]:
                        link.stacks = text
                    case ["leaving"]:
                        self._begin(self._release(link))
                    case _:
                        link.answers.add(tuple(frame))
                await self._notify()
        link.close()

    def _refusal(self, host: Host) -> str | None:
        if host.name in self._links:
            return (
                f"a host that calls itself {host.name} is there already, at {self._links[host.name].host.address}; "
                f"start one `mfleet node` on each host, and give hosts names of their own."
            )
        if host.rollout_only:
            if host.name in self._known:
                return f"host {host.name} belongs to the run; start `mfleet node` there without --rollout-only."
            return None if self._elastic else _NOT_ELASTIC
        if host.name not in self._known and len(self._known) == self._count:
            return f"the run has its {self._count} hosts (cluster.nodes): {', '.join(self._known)}."
        if self._known.get(host.name, host) != host:
            return f"host {host.name} was there before with another address or other devices; start the run again."
        return None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, true: Any, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(true)
        except TimeoutError:
            return False
        return True


class NodeRanks:
    """Ranks that `mfleet node` starts; see `cluster.launcher.RankStarter`."""

    def __init__(self, nodes: Nodes, ranks: Mapping[str, RanksOfHost]) -> None:
        """Args: ``ranks``: ranks of each host, by host name."""
        self._nodes, self._ranks = nodes, dict(ranks)
        self._host_of = {rank: host for host, mine in ranks.items() for rank in mine.ranks}
        self._numbers = itertools.count(1)
        self._attempt = 0

    async def start(self, address: str, token: str) -> None:
        """See `RankStarter.start`; waits for lost hosts. Raises UserError when they do not reconnect."""
        if not await self._nodes.wait(lambda: not self._missing(), self._nodes.timeout_s):
            raise UserError(
                f"Host {self._missing()[0]} was lost and did not come back within {self._nodes.timeout_s:g} s "
                f"(cluster.join_timeout_s); start `mfleet node` there again, and then the same run."
            )
        self._attempt = next(self._numbers)
        for host, ranks in self._ranks.items():
            if (link := self._nodes._links.get(host)) is None:  # lost while others were sent theirs
                raise ConnectionError(f"host {host} was lost while the ranks were started")
            await link.send("start", self._attempt, address, asdict(ranks))

    async def how_ended(self, rank: int) -> str:
        await self._nodes.wait(lambda: self._words(rank) is not None, LAST_WORDS_S)
        return self._words(rank) or f"rank {rank} on host {self._host_of[rank]} closed its connection"

    def failed(self) -> str | None:
        return next((words for rank in self._host_of if (words := self._words(rank)) is not None), None)

    async def stop(self, deadline_s: float) -> None:
        links = [link for host in self._ranks if (link := self._nodes._links.get(host)) is not None]
        for link in links:
            await link.send("stop", self._attempt, deadline_s)
        stopped = ("stopped", self._attempt)
        await self._nodes.wait(
            lambda: all(link.gone or stopped in link.answers for link in links), deadline_s + ANSWER_S
        )

    def _missing(self) -> list[str]:
        return [host for host in self._ranks if host not in self._nodes._links]

    def _words(self, rank: int) -> str | None:
        host = self._host_of[rank]
        link = self._nodes._links.get(host)
        if link is None:
            return f"rank {rank} was lost with host {host}, whose `mfleet node` is gone"
        return link.ended.get((self._attempt, rank))
