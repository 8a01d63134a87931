"""Who is where in a run, from what hosts and ranks say of themselves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from held_ports import held_ports
from policy_fixtures import make_config, write_config
from waiting import HANG_S, until

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.cluster.joined_nodes import NodeRanks, RanksOfHost, host_to_plain
from megatron_fleet.cluster.launcher import ExternalRanks, LocalRanks
from megatron_fleet.cluster.placement import PlacementRequest, place, ranks_by_host
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.loop.hosts import open_hosts
from megatron_fleet.trainer.links import RankListener
from megatron_fleet.trainer.messages import Identity

TOKEN = "the run's token"
HERE = os.uname().nodename
GPUS = tuple(Device(i, f"GPU-{i}", "H100", 80 << 30) for i in (2, 0, 1))


def configured(tmp_path: Path, **cluster: object) -> Config:
    tree = make_config(write_config(tmp_path / "model")).model_dump()
    tree["run"] |= {"out": str(tmp_path / "out")}
    tree["parallel"] |= {"data": 2}
    tree["cluster"] |= {"join_timeout_s": HANG_S} | cluster
    return Config.model_validate(tree)


@pytest.fixture
def address(monkeypatch) -> Iterator[str]:
    """Where the controller of this test is to listen."""
    with held_ports(1) as (port,):
        monkeypatch.setenv("MFLEET_CONTROLLER", address := f"127.0.0.1:{port}")
        monkeypatch.setenv("MFLEET_TOKEN", TOKEN)
        monkeypatch.setenv("MFLEET_HOST_ADDRESS", "10.0.0.1")
        yield address


async def say(address: str, kind: str, who: object) -> asyncio.StreamWriter:
    """Dial once the controller listens; what keeps the connection."""
    host, port = address.rsplit(":", 1)
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            break
        except OSError:
            await asyncio.sleep(0.02)
    writer.write(frames.pack(kind, await handshake.dial(reader, writer, TOKEN), who))
    return writer


def rank(number: int, host: str, address: str) -> dict[str, object]:
    return Identity(number, 2, 0, host, 1, "srun", address).to_plain()


async def opened(config: Config, address: str, *hellos: tuple[str, object]) -> tuple[Inventory, object]:
    """The inventory that comes of what is said, and the starter of the ranks."""
    dialling = [asyncio.create_task(say(address, *hello)) for hello in hellos]
    async with open_hosts(config, TOKEN) as hosts:
        starter = hosts.starter(
            config,
            place(hosts.inventory, PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines)),
        )
        for writer in await asyncio.gather(*dialling):
            writer.close()
    return hosts.inventory, starter


async def test_one_machine_needs_nobody(tmp_path, monkeypatch):
    monkeypatch.delenv("MFLEET_CONTROLLER", raising=False)
    inventory, starter = await opened(configured(tmp_path), "")
    assert [(host.name, host.address) for host in inventory.hosts] == [(HERE, "127.0.0.1")]
    assert isinstance(starter, LocalRanks)


async def test_nodes_are_hosts_and_start_the_ranks(tmp_path, address):
    nodes = [("node", host_to_plain(Host(name, at))) for name, at in (("b", "10.0.0.2"), (HERE, "10.0.0.1"))]
    inventory, starter = await opened(configured(tmp_path, nodes=2), address, *nodes)
    assert [(host.name, host.address) for host in inventory.hosts] == [(HERE, "10.0.0.1"), ("b", "10.0.0.2")]
    assert isinstance(starter, NodeRanks)


async def test_ranks_that_others_start_say_where_they_are(tmp_path, address):
    ranks = [("rank", rank(0, HERE, "10.0.0.1")), ("rank", rank(1, "b", "10.0.0.2"))]
    inventory, starter = await opened(configured(tmp_path, ranks="external"), address, *ranks)
    assert [(h.name, h.address, h.ranks, h.rollout) for h in inventory.hosts] == [
        (HERE, "10.0.0.1", (0,), True),
        ("b", "10.0.0.2", (1,), False),
    ]
    assert isinstance(starter, ExternalRanks)
    joined = [*ranks, ("node", host_to_plain(Host("b", "10.0.0.2")))]
    inventory, _ = await opened(configured(tmp_path, ranks="external", nodes=1), address, *joined)
    assert [(h.name, h.ranks, h.rollout) for h in inventory.hosts] == [(HERE, (0,), True), ("b", (1,), True)]


async def test_a_missing_rank_is_named(tmp_path, address, monkeypatch):
    config = configured(tmp_path, ranks="external", join_timeout_s=0.5)
    who = RankListener.who

    async def when_one_is_there(self, timeout_s):
        await until(lambda: self._dialled)
        return await who(self, timeout_s)

    monkeypatch.setattr(RankListener, "who", when_one_is_there)
    with pytest.raises(
        UserError, match=rf"1 of 2 ranks did not connect to {address} within 0.5 s .* rank 1; start them"
    ):
        await opened(config, address, ("rank", rank(0, HERE, "10.0.0.1")))


def test_ranks_get_the_devices_of_their_places_in_order():
    inventory = Inventory((Host("a", "10.0.0.1", GPUS), Host("b", "10.0.0.2", GPUS)))
    placement = place(inventory, PlacementRequest(4, engines=1))
    assert ranks_by_host(placement, inventory, threads=3) == {
        "a": RanksOfHost((0, 1, 2), 4, 3, "GPU-2,GPU-0,GPU-1"),
        "b": RanksOfHost((3,), 4, 3, "GPU-2"),
    }
    alone = Inventory((Host("a"),))
    assert ranks_by_host(place(alone, PlacementRequest(2)), alone, 1) == {"a": RanksOfHost((0, 1), 2, 1)}
