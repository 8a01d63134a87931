"""`mfleet node`: one host of a run. It starts this host's ranks and joins Ray at the controller's request.

Everything that it started ends with it, and it ends when its connection to the controller closes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.cluster.inventory import Host, local_inventory
from megatron_fleet.cluster.janitor import Janitor, marks
from megatron_fleet.cluster.joined_nodes import OBJECT_STORE_BYTES, RAY_SETTINGS, RanksOfHost, RayHead, host_to_plain
from megatron_fleet.cluster.launcher import POLL_S, LocalRanks, spawn
from megatron_fleet.cluster.rank_identity import controller_address, without_rank_variables
from megatron_fleet.cluster.restarts import OutOfRestarts, Restarts
from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.platform.processes import run_processes, stacks
from megatron_fleet.weights.fetch.cache import fetch

CONNECT_DEADLINE_S = 600.0
"""Nodes may be up long before the controller is."""
CONNECT_INTERVAL_S = 0.5
CONTROLLER_GONE = 3
"""Exit status of a node whose controller died."""
MAX_RAY_RESTARTS = 10
"""Within an hour. Ray gives a node 30 s to register, which is too little on a host that is very busy."""
RELEASE_S = 20.0
"""Seconds to wait for the release of a host with engines only; cloud providers announce a preemption 30 s or more
before it."""
READ_LIMIT = 1 << 20


def main(environ: Mapping[str, str], rollout_only: bool = False) -> int:
    """Serve as a host of the run whose controller ``environ`` names; returns the exit status.

    Args:
        rollout_only: this host gets engines only, and may join and leave at any time.

    Raises:
        UserError: the environment has no controller address, nothing answers there, or it refuses this host.
    """
    address, token = controller_address(environ)
    (host,) = local_inventory(environ, alone=False).hosts
    host = replace(host, rollout_only=rollout_only)
    leaving = asyncio.Event() if rollout_only else None
    return asyncio.run(_until_stopped(_serve(address, token, host, leaving), leaving))


async def _until_stopped(work: Any, leaving: asyncio.Event | None = None) -> int:
    """Run ``work``; SIGINT or SIGTERM ends it and everything it started. Returns the exit status.

    Args:
        leaving: set at the first signal instead; a second one, or ``RELEASE_S``, ends ``work``.
    """
    task, received = asyncio.ensure_future(work), []
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if leaving is not None and len(received) == 1:
            leaving.set()
            loop.call_later(RELEASE_S, task.cancel)
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]


async def _serve(address: str, token: str, host: Host, leaving: asyncio.Event | None = None) -> int:
    reader, writer = await _dial(address)
    frames.keep_alive(writer.get_extra_info("socket"))
    try:
        writer.write(frames.pack("node", await handshake.dial(reader, writer, token), host_to_plain(host)))
    except handshake.NotOfThisRun as error:
        raise UserError(f"MFLEET_CONTROLLER={address}: {error}; give both sides the same MFLEET_TOKEN.") from None
    answer = await frames.read(reader)
    if answer is None or answer[0] != "welcome":
        reason = answer[1] if answer else "the run waits for no further hosts (cluster.nodes)."
        raise UserError(f"MFLEET_CONTROLLER={address}: the controller refused host {host.name}: {reason}")
    say(f"mfleet node: {host.name} ({host.address}) has joined the run at {address}", sys.stderr)
    await asyncio.to_thread(fetch, answer[2])  # the processes that are started here get no HF_TOKEN
    node = Node(host, Path(answer[1]), writer)
    asking = None if leaving is None else asyncio.create_task(node.ask_for_release(leaving))
    try:
        return await node.obey(reader)
    finally:
        if asking is not None:
            asking.cancel()
        await node.close()
        writer.close()


async def _dial(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.rsplit(":", 1)
    deadline = asyncio.get_running_loop().time() + CONNECT_DEADLINE_S
    while True:
        try:
            return await asyncio.open_connection(host, int(port), limit=READ_LIMIT)
        except OSError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise UserError(
                    f"MFLEET_CONTROLLER={address}: nobody answered within {CONNECT_DEADLINE_S:.0f} s ({error}); start "
                    f"`mfleet train` there."
                ) from None
            await asyncio.sleep(CONNECT_INTERVAL_S)


def own_folder(path: Path) -> Path:
    """Make a folder that only this user can enter, and return it; a folder that is there must be one.

    Raises:
        UserError: another user made it, or can enter it, and could plant files and sockets in it.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(
            f"{path} is not a folder of this user alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}), "
            f"and Ray's sockets would be in it; remove it."
        )
    return path


@dataclass(slots=True)
class _Attempt:
    """One started set of ranks."""

    number: int
    ranks: LocalRanks
    watching: asyncio.Task[None]


class Node:
    """Ranks and Ray processes that this host runs for the controller."""

    def __init__(self, host: Host, logs: Path, writer: asyncio.StreamWriter) -> None:
        self._host, self._logs, self._writer = host, logs, writer
        self._log = logs / f"node-{host.name}.log"
        self._attempt: _Attempt | None = None
        self._janitor: Janitor | None = None
        self._ray: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def obey(self, reader: asyncio.StreamReader) -> int:
        """Execute the controller's requests until it releases this host or is gone; returns the exit status."""
        while (frame := await frames.read(reader)) is not None:
            match frame:
                case ["start", int(attempt), str(address), dict(ranks)]:
                    await self._start(attempt, address, RanksOfHost(**ranks))
                case ["stop", int(attempt), deadline_s]:
                    self._begin(self._stop(attempt, deadline_s))
                case ["stacks"]:
                    self._begin(self._tell_stacks())
                case ["join", dict(head)]:
                    self._join(RayHead(**head))
                case ["leave"]:
                    await self._leave()
                    self._tell("left")
                case ["quit"]:
                    return 0
        self._say("the controller is gone")
        return CONTROLLER_GONE

    async def ask_for_release(self, leaving: asyncio.Event) -> None:
        """Ask for the release of this host, once ``leaving`` is set."""
        await leaving.wait()
        self._tell("leaving")
        self._say("leaving the run; the requests of this host's engines move to other engines")

    async def close(self) -> None:
        """Kill everything that was started here immediately."""
        for task in self._tasks:
            task.cancel()
        if self._attempt is not None:
            self._attempt.watching.cancel()
            await self._attempt.ranks.stop(0.0)
        await self._leave()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_stacks(self) -> None:
        self._tell("stacks", await asyncio.to_thread(lambda: stacks(run_processes())))

    async def _start(self, attempt: int, address: str, ranks: RanksOfHost) -> None:
        started = LocalRanks(ranks, self._logs)
        await started.start(address, os.environ["MFLEET_TOKEN"])
        self._attempt = _Attempt(attempt, started, asyncio.create_task(self._watch(attempt, started)))

    async def _watch(self, attempt: int, ranks: LocalRanks) -> None:
        reported: set[int] = set()
        while True:
            for rank, words in ranks.ended().items():
                if rank not in reported:
                    reported.add(rank)
                    self._tell("ended", attempt, rank, f"{words}, on host {self._host.name}")
            await asyncio.sleep(POLL_S)

    async def _stop(self, attempt: int, deadline_s: float) -> None:
        if self._attempt is not None and self._attempt.number == attempt:
            ended, self._attempt = self._attempt, None
            ended.watching.cancel()
            await ended.ranks.stop(deadline_s)
        self._tell("stopped", attempt)

    def _join(self, head: RayHead) -> None:
        self._janitor = Janitor(head.run_id, own_folder(Path(head.folder)))
        self._ray = asyncio.create_task(self._keep_ray(head))

    async def _leave(self) -> None:
        if self._ray is not None:
            self._ray.cancel()
        if self._janitor is not None:
            janitor, self._janitor = self._janitor, None
            janitor.look()
            await asyncio.to_thread(janitor.close)

    async def _keep_ray(self, head: RayHead) -> None:
        restarts = Restarts(f"Ray on host {self._host.name}", f"Its log is {self._log}.", MAX_RAY_RESTARTS)
        while True:
            process = self._start_ray(head)
            while process.poll() is None:
                await asyncio.sleep(POLL_S)
            try:
                await restarts.pause(f"`ray start` ended with status {process.returncode}")
            except OutOfRestarts as error:
                self._say(str(error))
                return  # the controller detects the loss of its engines

    def _start_ray(self, head: RayHead) -> subprocess.Popen[bytes]:
        environment = without_secrets(without_rank_variables(os.environ))
        environment.pop("RAY_ADDRESS", None)
        environment |= head.trust | marks(head.run_id) | RAY_SETTINGS
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={head.address}", "--block"]
        # Our actors reserve no CPUs, and Ray starts one idle worker per CPU.
        command += [f"--node-ip-address={self._host.address}", "--num-cpus=1"]
        # The controller's Ray runs with log_to_driver=False, so nothing would read what the log monitor sends.
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-log-monitor=False"]
        return spawn(command, environment, self._log)

    def _tell(self, *frame: Any) -> None:
        with suppress(OSError):
            self._writer.write(frames.pack(*frame))

    def _say(self, text: str) -> None:
        say(f"mfleet node: {text}", sys.stderr)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            print(f"{socket.gethostname()}: {text}", file=log)
