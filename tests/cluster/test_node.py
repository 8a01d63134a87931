"""`mfleet node` with its controller: real processes on this machine, as many hosts as they say they are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from waiting import HANG_S, until

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.cluster.inventory import Device, Host
from megatron_fleet.cluster.joined_nodes import NodeRanks, Nodes, RanksOfHost, RayHead, host_from_plain, host_to_plain
from megatron_fleet.cluster.node_process import own_folder
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.trainer.links import RankListener

TOKEN = "the run's token"
HERE = os.uname().nodename


@contextlib.asynccontextmanager
async def controller(
    logs: Path, count: int = 1, ranks: int = 2, wait_s: float = HANG_S, elastic: bool = False
) -> AsyncIterator:
    """A listener that admits nodes, and these."""
    config = load(["experiment=quickstart"]).model_dump_json()
    listener, nodes = RankListener(TOKEN, config, ranks), Nodes(count, logs, wait_s, elastic=elastic)
    listener.admit("node", nodes.admit)
    await listener.listen("127.0.0.1", 0)
    try:
        yield listener, nodes
    finally:
        await nodes.close()
        listener.close()


@contextlib.contextmanager
def node(address: str, token: str = TOKEN, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`mfleet node` on this machine."""
    environment = os.environ | {"MFLEET_CONTROLLER": address, "MFLEET_TOKEN": token, "MFLEET_HOST_ADDRESS": "127.0.0.1"}
    command = [sys.executable, "-m", "megatron_fleet.cli", "node", *arguments]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def ended(process: subprocess.Popen[str]) -> int:
    return await asyncio.to_thread(process.wait, HANG_S)


async def gone(pids: list[int]) -> None:
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def both(nodes: Nodes) -> NodeRanks:
    return NodeRanks(nodes, {HERE: RanksOfHost((0, 1), 2, 1)})


@pytest.mark.slow
async def test_a_node_starts_ranks_tells_their_end_and_starts_them_again(tmp_path):
    async with controller(tmp_path / "logs") as (listener, nodes):
        with node(listener.address) as process:
            (host,) = await nodes.hosts()
            assert (host.name, host.address) == (HERE, "127.0.0.1")
            ranks = both(nodes)
            await ranks.start(listener.address, TOKEN)
            links = await listener.gather(HANG_S, ranks.failed)
            assert [(link.who.rank, link.who.local_rank, link.who.source) for link in links] == [
                (0, 0, "mfleet"),
                (1, 1, "mfleet"),
            ]
            first = [link.who.pid for link in links]
            assert await nodes.stacks(own=HERE) == {}
            stacks = (await nodes.stacks(own="the controller's"))[HERE]
            assert all(f"== pid {pid}, " in stacks for pid in (process.pid, *first))
            assert "tell_stacks" in stacks or "run_forever" in stacks
            os.kill(first[0], signal.SIGSTOP)  # else it ends by itself, sooner or later: its configuration is empty
            os.kill(first[1], signal.SIGKILL)
            log = tmp_path / "logs" / "rank_1.log"
            words = await ranks.how_ended(1)
            assert words.startswith("rank 1 was killed by SIGKILL")
            assert words.endswith(f"; its log is {log}, on host {HERE}") and ranks.failed() == words
            await ranks.stop(0.0)
            await gone(first)
            await ranks.start(listener.address, TOKEN)
            assert ranks.failed() is None  # what the first ones did is past
            links = await listener.gather(HANG_S, ranks.failed)
            await nodes.close()
            assert await ended(process) == 0
            await gone([link.who.pid for link in links])


async def test_everything_ends_when_the_controller_is_gone(tmp_path):
    async with controller(tmp_path / "logs") as (listener, nodes):
        with node(listener.address) as process:
            await nodes.hosts()
            ranks = both(nodes)
            await ranks.start(listener.address, TOKEN)
            links = await listener.gather(HANG_S, ranks.failed)
            nodes._links[HERE].close()
            assert await ended(process) == 3
            await gone([link.who.pid for link in links])
            assert "the controller is gone" in (tmp_path / "logs" / f"node-{HERE}.log").read_text()


@pytest.mark.slow
async def test_a_lost_node_is_told_waited_for_and_taken_back(tmp_path):
    async with controller(tmp_path / "logs") as (listener, nodes):
        ranks = both(nodes)
        with node(listener.address) as process:
            await nodes.hosts()
            await ranks.start(listener.address, TOKEN)
            links = await listener.gather(HANG_S, ranks.failed)
            process.kill()
            assert f"rank 0 was lost with host {HERE}" in await ranks.how_ended(0)
            await gone([link.who.pid for link in links])
        starting = asyncio.create_task(ranks.start(listener.address, TOKEN))
        await asyncio.sleep(0.2)
        assert not starting.done()
        with node(listener.address):
            await starting
            assert len(await listener.gather(HANG_S, ranks.failed)) == 2


async def test_a_host_that_does_not_come_back_is_named(tmp_path):
    async with controller(tmp_path / "logs", wait_s=0.2) as (_, nodes):
        with pytest.raises(UserError, match=r"cluster.nodes=1: 0 hosts have joined within 0.2 s .*`mfleet node`"):
            await nodes.hosts()
        with pytest.raises(UserError, match=rf"Host {HERE} was lost and did not come back within 0.2 s"):
            await both(nodes).start("h:1", TOKEN)


async def test_a_host_that_is_lost_while_ranks_are_started_is_named(tmp_path):
    a, b = (host_to_plain(Host(name, "10.0.0.1")) for name in "ab")
    async with controller(tmp_path / "logs", count=2) as (listener, nodes):
        (_, one), (_, other) = [await dial(listener.address, "node", host) for host in (a, b)]
        await nodes.hosts()
        send = nodes._links["a"].send

        async def slow(*frame):
            other.close()
            await until(lambda: "b" not in nodes._links)
            await send(*frame)

        nodes._links["a"].send = slow
        ranks = NodeRanks(nodes, {"a": RanksOfHost((0,), 2, 1), "b": RanksOfHost((1,), 2, 1)})
        with pytest.raises(ConnectionError, match="host b was lost while the ranks were started"):
            await ranks.start("h:1", TOKEN)
        one.close()


class Engines:
    """Notes which hosts are added, released and removed; a release takes until ``may_go`` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.may_go = asyncio.Event()

    async def add_host(self, host: Host) -> None:
        self.calls.append(("add", host.name))

    async def release_host(self, name: str) -> None:
        self.calls.append(("release", name))
        await self.may_go.wait()

    async def remove_host(self, name: str) -> None:
        self.calls.append(("remove", name))


async def test_hosts_with_engines_only_come_and_go(tmp_path):
    lasting, spot = (host_to_plain(Host(n, "10.0.0.1", rollout_only=n == "spot")) for n in ("lasting", "spot"))
    async with controller(tmp_path / "logs", elastic=True) as (listener, nodes):
        engines = nodes.rollout_hosts = Engines()
        _, early = await dial(listener.address, "node", spot)
        assert not nodes._known and engines.calls == []  # it counts for nothing, and Ray is not there yet
        _, writer = await dial(listener.address, "node", lasting)
        assert [host.name for host in await nodes.hosts()] == ["lasting"]
        await nodes.join(RayHead("a:1", {}, "folder", "run"), "lasting")
        await until(lambda: engines.calls == [("add", "spot")])
        early.close()
        await until(lambda: engines.calls[1:] == [("remove", "spot")])
        moved = spot | {"address": "10.0.0.7"}
        _, again = await dial(listener.address, "node", moved)
        await until(lambda: engines.calls[2:] == [("add", "spot")])
        again.close()
        writer.close()
        await until(lambda: not nodes._links)
        refusal, _ = await dial(listener.address, "node", lasting | {"rollout_only": True})
        assert refusal is not None and "host lasting belongs to the run" in refusal[1]


@pytest.mark.slow
async def test_a_host_with_engines_only_asks_for_its_release_at_sigterm(tmp_path):
    async with controller(tmp_path / "logs", count=1, elastic=True) as (listener, nodes):
        engines = nodes.rollout_hosts = Engines()
        with node(listener.address, TOKEN, "--rollout-only") as process:
            await until(lambda: HERE in nodes._links)
            process.terminate()
            await until(lambda: engines.calls == [("release", HERE)])
            assert process.poll() is None
            engines.may_go.set()
            assert await ended(process) == 0
            await until(lambda: engines.calls[1:] == [("remove", HERE)])


async def test_a_run_with_a_fixed_number_of_engines_refuses_hosts_with_engines_only(tmp_path):
    async with controller(tmp_path / "logs") as (listener, _):
        refusal, _ = await dial(listener.address, "node", host_to_plain(Host("a", "10.0.0.1", rollout_only=True)))
        assert refusal is not None and refusal[0] == "refused"
        assert "rollout.engine.replicas=auto and rollout.engine.colocated=false" in refusal[1]


async def dial(address: str, kind: str, who: object) -> tuple[list | None, asyncio.StreamWriter]:
    """The answer, and what keeps the connection."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(frames.pack(kind, await handshake.dial(reader, writer, TOKEN), who))
    return await asyncio.wait_for(frames.read(reader), HANG_S), writer


async def test_only_hosts_of_this_run_are_let_in(tmp_path):
    a, b = (host_to_plain(Host(name, "10.0.0.1")) for name in "ab")
    async with controller(tmp_path / "logs", count=1) as (listener, _):
        for hello in (("node", {"name": 1}), ("intruder", a)):
            assert (await dial(listener.address, *hello))[0] is None
        welcome, writer = await dial(listener.address, "node", a)
        assert welcome == ["welcome", str(tmp_path / "logs"), ""]
        for who, words in ((a, "calls itself a is there already"), (b, "has its 1 hosts")):
            refusal, _ = await dial(listener.address, "node", who)
            assert refusal is not None and refusal[0] == "refused" and words in refusal[1]
        writer.close()


def test_a_refused_node_says_why(tmp_path):
    async def story() -> tuple[int, str]:
        async with controller(tmp_path / "logs") as (listener, _):
            with node(listener.address, "another") as process:
                status = await ended(process)
                assert process.stderr is not None
                return status, process.stderr.read()

    status, errors = asyncio.run(story())
    assert status == 2
    assert errors.startswith("error: MFLEET_CONTROLLER=127.0.0.1:") and "the same MFLEET_TOKEN" in errors
    assert "another" not in errors


@pytest.mark.parametrize("rollout_only", [False, True])
def test_a_host_travels_whole(rollout_only):
    host = Host("a", "10.0.0.1", (Device(3, "GPU-3", "H100", 80 << 30),), rollout_only=rollout_only)
    assert host_from_plain(frames.unpack(frames.body("node", host_to_plain(host)))[1]) == host
    for wrong in (None, {}, {"name": "a", "address": "b", "devices": [{"index": 1}]}):
        with pytest.raises(ValueError):
            host_from_plain(wrong)


@pytest.mark.parametrize("found", ["entered by others", "link", "file"])
def test_a_folder_that_another_user_may_have_planted_is_refused(tmp_path, found):
    folder = tmp_path / "ray"
    assert own_folder(folder) == own_folder(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    if found == "entered by others":
        folder.chmod(0o770)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere") if found == "link" else folder.write_text("")
    with pytest.raises(UserError, match=f"^{folder} is not a folder of this user alone"):
        own_folder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path):
    folder = tmp_path / "ray"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with pytest.raises(UserError, match=r"owner 65534, mode 700\), and Ray's sockets"):
        own_folder(folder)
