"""EngineGroup that are lost under a transport that cannot give them their version again without the trainer.

Real slot, colocation and transport; the trainer and the actor below the slot are in memory.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("ray")

from fake_engines import Slot, pause
from fake_rollout import FakeEngines, FakeTransport
from fake_trainer import FakeTrainer
from waiting import HANG_S, until

from megatron_fleet.cluster.restarts import Restarts
from megatron_fleet.config.load import load
from megatron_fleet.evaluation.apart import Postponed
from megatron_fleet.loop.engine_weights import EngineWeights
from megatron_fleet.rollout.components import ComponentLost
from megatron_fleet.rollout.engine_slot import EngineGroup
from megatron_fleet.rollout.requests import RolloutFailed
from megatron_fleet.trainer.base import AdamParams, TrainerLost
from megatron_fleet.weight_sync.cuda_ipc.controller import CudaIpcTransport


class OneEngine:
    """Parts that `EngineWeights` uses of a rollout with one engine."""

    resend = None

    def __init__(self, slot):
        self.slot, self.engines = slot, EngineGroup([slot], self.wait_ready)
        self.sleep, self.wake = slot.sleep, slot.wake

    async def wait_ready(self):
        pass


class System:
    """A trainer and an engine, with version 0 synced."""

    def __init__(self, tmp_path, monkeypatch, colocated=True):
        self.slot, self.trainer = Slot(monkeypatch), FakeTrainer(16)
        self.rollout = OneEngine(self.slot)
        overrides = [f"rollout.engine.colocated={str(colocated).lower()}", f"run.out={tmp_path}"]
        config = load(["experiment=quickstart", *overrides])

        self.weights = EngineWeights(config.rollout, config.run, self.trainer, self.rollout, CudaIpcTransport({}))
        monkeypatch.setattr(self.slot, "_find_resend", lambda: self.rollout.resend)

    async def begin(self):
        await self.slot.begin()
        await self.weights.start()
        await self.weights.update(0)

    def sent(self):
        return [call for call in self.trainer.calls if call.startswith("send_weights")]


@pytest.fixture
async def system(tmp_path, monkeypatch):
    made = System(tmp_path, monkeypatch)
    await made.begin()
    async with asyncio.timeout(HANG_S):
        yield made
    await made.slot.close()


async def test_one_lost_in_its_sleep_gets_the_new_version_before_the_rollout(system):
    await system.weights.to_trainer()
    await system.slot.lose()
    await system.weights.update(1)
    assert system.slot.version == 1 and system.slot.restarts.count == 1
    assert system.sent() == ["send_weights 0", "send_weights 1", "send_weights 1"]
    assert not any(system.trainer.held.values())


async def test_one_lost_while_it_rolls_gets_its_version_again(system):
    await system.slot.lose()
    await until(lambda: system.slot._serving.is_set())
    assert system.slot.version == 0 and system.sent() == ["send_weights 0"] * 2
    assert not any(system.trainer.held.values())


async def test_one_that_is_not_back_before_training_begins_takes_part_in_the_next_update(system):
    system.slot.may_start.clear()
    await system.slot.lose()
    turning = asyncio.create_task(system.weights.to_trainer())
    await asyncio.sleep(0.05)
    system.slot.may_start.set()
    await turning
    await system.weights.update(1)
    assert system.slot.version == 1 and system.slot.restarts.count == 1
    assert system.sent()[-1] == "send_weights 1" and len(system.sent()) <= 3


async def test_a_trainer_lost_together_with_an_engine_is_restarted_without_it(system):
    system.trainer.die("its host is gone")
    await system.slot.lose()
    await until(lambda: "start" in [call[0] for call in system.slot.calls])
    await system.weights.restart(TrainerLost("its host is gone"))
    await system.weights.update(0)
    assert system.slot.version == 0 and system.slot.restarts.count == 1
    assert system.sent() == ["send_weights 0"] * 2


async def test_a_trainer_lost_while_it_sends_again_costs_the_engine_a_second_restart(system):
    system.trainer.fail_next("send_weights", TrainerLost("killed"))
    await system.slot.lose()
    await until(lambda: system.slot.restarts.count == 2)
    await system.weights.restart(TrainerLost("killed"))
    await system.weights.update(0)
    assert system.slot.version == 0 and system.slot.restarts.count == 2


async def test_weights_do_not_change_while_they_are_sent_again(tmp_path, monkeypatch):
    system = System(tmp_path, monkeypatch, colocated=False)
    await system.begin()
    before, may_begin = system.trainer.weights.copy(), asyncio.Event()
    engine = FakeEngines(16, [])
    engine.begun, begin = False, engine.begin_update

    async def slow():
        await may_begin.wait()
        await begin()

    engine.begin_update = slow
    sending = asyncio.create_task(system.rollout.resend(engine, 0))
    await asyncio.sleep(0.01)

    async def train():
        await system.weights.to_trainer()
        system.trainer.gradient = np.ones(16)
        await system.trainer.optim_step(AdamParams(lr=1.0))

    training = asyncio.create_task(train())
    await asyncio.sleep(0.05)
    may_begin.set()
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(sending, training)
    assert engine.version == 0 and np.array_equal(engine.weights, before)
    assert not np.array_equal(system.trainer.weights, before)
    await system.slot.close()


class Beside:
    """A trainer, an engine of the rollout and an evaluation engine, with version 0 synced."""

    def __init__(self, tmp_path, monkeypatch, lasting):
        self.rollout_slot, self.slot, self.trainer = Slot(monkeypatch), Slot(monkeypatch), FakeTrainer(16)
        self.rollout = OneEngine(self.rollout_slot)
        self.rollout.eval_engines = EngineGroup([self.slot], self.rollout.wait_ready)
        config = load(["experiment=quickstart", "rollout.engine.colocated=false", f"run.out={tmp_path}"])
        transport = Lasting() if lasting else FakeTransport()
        self.weights = EngineWeights(config.rollout, config.run, self.trainer, self.rollout, transport)
        monkeypatch.setattr(self.slot, "_find_resend", lambda: self.rollout.eval_resend)

    async def begin(self):
        await self.rollout_slot.begin()
        await self.slot.begin()
        await self.weights.start()
        await self.weights.update(0)

    def sent(self):
        return [call for call in self.trainer.calls if call.startswith("send_weights")]


class Lasting(FakeTransport):
    """Engines can load the last version, and no other one, as long as no newer one is sent."""

    lasting = True

    async def sync(self, trainer, engines, version):
        await engines.open_transport({"memory": 1})
        await engines.begin_update()
        await trainer.send_weights(version, {}, engines.load)
        await engines.finish_update(version, {"round": version})


@pytest.fixture(params=[False, True], ids=["sent again", "lasting"])
async def beside(tmp_path, monkeypatch, request):
    made = Beside(tmp_path, monkeypatch, request.param)
    await made.begin()
    async with asyncio.timeout(HANG_S):
        yield made
    await made.slot.close()
    await made.rollout_slot.close()


async def test_evaluation_engines_get_the_weights_that_they_are_sent_and_no_others(beside):
    lasting = isinstance(beside.weights._transport, Lasting)
    assert beside.slot.names() == [] and beside.slot.version is None
    await beside.weights.send_for_evaluation(0)
    assert beside.slot.version == 0
    # The trainer is asked only where engines cannot load the version of the rollout's.
    assert beside.sent() == ["send_weights 0"] * (1 if lasting else 2)
    await beside.weights.to_trainer()
    with pytest.raises(Postponed, match="newer weights than those of step 0"):
        await beside.weights.send_for_evaluation(0)
    await beside.weights.update(1)
    assert (beside.rollout_slot.version, beside.slot.version) == (1, 0)


async def test_an_evaluation_engine_gets_its_weights_again_while_the_trainer_has_them(beside):
    await beside.weights.send_for_evaluation(0)
    await beside.slot.lose()
    await until(lambda: beside.slot.is_serving)
    assert beside.slot.version == 0 and not beside.weights._eval_lost.is_set()
    if isinstance(beside.weights._transport, Lasting):
        assert ("load", {"round": 0}) in beside.slot.calls


async def test_one_whose_weights_are_gone_waits_for_the_next_and_says_so(beside):
    await beside.weights.send_for_evaluation(0)
    await beside.weights.to_trainer()
    await beside.weights.update(1)
    await beside.slot.lose()
    assert not beside.weights.can_send_for_evaluation()
    await beside.weights.lost_for_evaluation()
    assert beside.weights.can_send_for_evaluation() and not beside.slot.is_serving
    await beside.weights.to_trainer()  # does not wait for it
    await beside.weights.update(2)
    await beside.weights.send_for_evaluation(2)
    assert beside.slot.version == 2 and beside.slot.is_serving and beside.slot.restarts.count == 1
    assert not beside.weights._eval_lost.is_set()


async def test_the_trainer_waits_for_an_evaluation_engine_that_is_receiving(beside):
    beside.slot.actor.hang = "begin_update"
    sending = asyncio.create_task(beside.weights.send_for_evaluation(0))
    await until(lambda: "begin_update" in [call[0] for call in beside.slot.calls])
    turning = asyncio.create_task(beside.weights.to_trainer())
    await pause()
    assert not turning.done()
    beside.slot.actor.lost.set()
    await asyncio.gather(sending, turning)
    assert beside.slot.version == 0


async def test_a_trainer_that_is_lost_while_an_evaluation_engine_is_restarted_does_not_keep_the_sending(beside):
    if isinstance(beside.weights._transport, Lasting):
        pytest.skip("the trainer is not asked")
    beside.slot.actor.hang = "begin_update"
    sending = asyncio.create_task(beside.weights.send_for_evaluation(0))
    await until(lambda: "begin_update" in [call[0] for call in beside.slot.calls])
    beside.trainer._fail = {"send_weights": {3: TrainerLost("gone"), 4: TrainerLost("gone")}}
    beside.slot.actor.lost.set()
    with pytest.raises((Postponed, TrainerLost)):
        await sending


async def test_an_evaluation_engine_that_is_given_up_is_named(beside):
    async def gone():
        raise ComponentLost("its host is gone")

    beside.slot._make = gone
    beside.slot.restarts = Restarts("evaluation engine 0", "Its log is log.", 1)
    await beside.slot.lose()
    await until(lambda: beside.slot._watching.done())
    with pytest.raises(RolloutFailed, match="evaluation engine 0 died"):
        beside.weights.can_send_for_evaluation()
    with pytest.raises(RolloutFailed, match="evaluation engine 0 died"):
        await beside.weights.send_for_evaluation(0)
    await beside.weights.to_trainer()
    await beside.weights.update(1)
    assert beside.rollout_slot.version == 1
