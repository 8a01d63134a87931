"""Hosts with engines only, which join a rollout and leave it; the actors below the slots are in memory."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from fake_engines import Slot, give, pause
from rollout_config import rollout_config
from waiting import HANG_S, until

from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.cluster.placement import EnginePlace
from megatron_fleet.rollout.actors import ActorSettings
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.rollout.pool import Pool
from megatron_fleet.rollout.requests import RolloutFailed

OWN = Host("own", "10.0.0.1")


class Worker:
    """A worker that notes what it is told about engines."""

    name = "worker 0"

    def __init__(self):
        self.told = []

    async def engine_moved(self, before, now):
        self.told.append(("moved", before, now))

    async def engine_leaves(self, address):
        self.told.append(("leaves", address))

    async def close(self):
        pass


class AddedSlot(Slot):
    """A slot with a name, a host and a count of its own."""

    def __init__(self, monkeypatch, index, host, joining):
        super().__init__(monkeypatch, joining)
        self.name, self.host = f"engine {index}", host
        self._counted = EngineStatistics(generated_tokens=10**index)


@pytest.fixture
async def pool(tmp_path, monkeypatch):
    engine = {"replicas": "auto", "colocated": False}
    config = rollout_config(Path("none"), engine=engine, episodes_in_flight="auto")
    settings = ActorSettings(
        tmp_path, Path(sys.executable), "token", {}, [EnginePlace("own", ())], "gloo", Inventory((OWN,))
    )

    def slot(self, index, resend, joining=False):
        return AddedSlot(monkeypatch, index, self._settings.engine_host(index), joining)

    monkeypatch.setattr(Pool, "_engine_slot", slot)
    made = Pool(config, settings, {}, lambda: None, pause)
    made.workers[:] = [Worker()]
    (first,) = made.engines
    await first.begin()
    yield made
    await made.close()


def addresses(pool):
    return [(slot.name, slot.host) for slot in pool.engines]


async def test_a_host_adds_an_engine_for_each_of_its_devices_with_the_present_weights(pool):
    await give(pool.group, 3)
    devices = tuple(Device(i, f"GPU-{i}", "H100", 80 << 30) for i in range(2))
    await pool.add_host(Host("spot", "10.0.0.2", devices, rollout_only=True))
    await until(lambda: len(pool.engines) == 3)
    assert addresses(pool) == [("engine 0", "10.0.0.1"), ("engine 1", "10.0.0.2"), ("engine 2", "10.0.0.2")]
    assert {slot.version for slot in pool.engines} == {3}
    assert pool._settings.engine_devices(2)["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert [pool._settings.worker_host(index) for index in range(2)] == ["10.0.0.1"] * 2  # they would be lost with it
    assert sorted(pool.workers[0].told) == [("moved", "", pool.engines[i].endpoint) for i in (1, 2)]
    assert [reading.name for reading in pool.collector.monitor.engines] == ["engine 0", "engine 1", "engine 2"]
    assert pool.collector.flight.allowed == 3 * 32


async def test_a_host_that_leaves_is_released_first_and_one_that_is_gone_is_not_asked(pool):
    for name, address in (("spot", "10.0.0.2"), ("other", "10.0.0.3")):
        await pool.add_host(Host(name, address, rollout_only=True))
    await until(lambda: len(pool.engines) == 3)
    _, released, gone = pool.engines
    for slot in pool.engines:
        slot.calls.clear()
    pool.workers[0].told.clear()
    await pool.release_host("spot")
    assert pool.workers[0].told == [("leaves", released.endpoint), ("moved", released.endpoint, "")]
    assert released.names() == ["interrupt", "read_statistics"] and released.gone
    await pool.remove_host("other")
    assert pool.workers[0].told[2:] == [("moved", gone.endpoint, "")] and gone.names() == []
    assert addresses(pool) == [("engine 0", "10.0.0.1")] and pool.collector.flight.allowed == 32
    await pool.remove_host("spot")  # its connection closes after its release
    await pool.remove_host("never there")
    await give(pool.group, 4)
    assert pool.engines[0].version == 4
    # What they had counted is not lost with them.
    assert sum(one.generated_tokens for one in await pool.statistics()) == 111
    assert sum(one.generated_tokens for one in await pool.statistics()) == 0


async def test_a_host_that_leaves_while_its_engine_starts_adds_none(pool, monkeypatch):
    await pool.add_host(Host("spot", "10.0.0.2", rollout_only=True))
    (joining,) = pool._joining
    joining.may_start.clear()
    await pause()
    await pool.remove_host("spot")
    joining.calls.clear()
    joining.may_start.set()
    await pause()
    assert joining.names() == []
    assert addresses(pool) == [("engine 0", "10.0.0.1")] and not pool._joining
    await pool.add_host(Host("spot", "10.0.0.9", rollout_only=True))  # again, at another address
    await until(lambda: addresses(pool)[1:] == [("engine 2", "10.0.0.9")])


async def test_an_engine_that_cannot_start_is_left_out(pool, monkeypatch, caplog):
    async def fail(slot, *_):
        raise RolloutFailed("engine 1 died 4 times")

    monkeypatch.setattr(AddedSlot, "join", fail)
    await pool.add_host(Host("spot", "10.0.0.2", rollout_only=True))
    await until(lambda: "engine 1 is left out: engine 1 died 4 times" in caplog.text)
    assert len(pool.engines) == 1 and not pool._joining


async def test_a_rollout_without_engines_waits_for_one_and_not_for_ever(pool, monkeypatch):
    pool.engines[0].leave()
    pool.engines.clear()
    waiting = asyncio.create_task(pool._engines_there())
    await pause()
    assert not waiting.done()
    await pool.add_host(Host("spot", "10.0.0.2", rollout_only=True))
    await asyncio.wait_for(waiting, HANG_S)
    await pool.remove_host("spot")
    cluster = pool._config.cluster.model_copy(update={"join_timeout_s": 0.05})
    pool._config = pool._config.model_copy(update={"cluster": cluster})
    with pytest.raises(RolloutFailed, match=r"no engine for 0.05 s .*mfleet node --rollout-only"):
        await pool._engines_there()
