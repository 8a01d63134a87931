"""Engines that share the trainer's devices, with engines that are not there: order, and deaths at every moment."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")

from fake_engines import INIT_INFO, UPDATE, Slot, actor_without_vllm, pause
from rollout_config import rollout_config

from megatron_fleet.rollout.requests import RolloutFailed


class FakeLlm:
    """Sleeps and wakes as vLLM does: two parts, and scheduling goes on with the second."""

    errored = False

    def __init__(self, fail=""):
        self.calls, self.asleep, self.fail = [], set(), fail

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            self.calls.append(name)
            if name == self.fail:
                raise ValueError("no memory")

        return call

    async def is_paused(self):
        return True

    async def sleep(self, level, mode):
        assert mode == "abort"
        await self.__getattr__(f"sleep {level}")()
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags):
        await self.__getattr__(f"wake {tags}")()
        self.asleep -= set(tags)
        return not self.asleep


@pytest.fixture
def actor(tmp_path, monkeypatch):
    return actor_without_vllm(tmp_path, monkeypatch, rollout_config(tmp_path), FakeLlm())


async def update(actor):
    await actor.open_transport(INIT_INFO)
    await actor.begin_update()
    await actor.load({"round": 1})
    await actor.finish_update(1)


async def test_an_update_in_sleep_does_not_let_the_engine_go_on(actor):
    reason = await actor.sleep()
    await actor.wake("weights")
    await update(actor)
    assert "resume_generation" not in actor._llm.calls
    await actor.wake("kv_cache")  # in vLLM this one resumes
    assert actor._llm.calls[:2] == ["sleep 2", "wake ['weights']"]
    assert actor._llm.calls[-1] == "wake ['kv_cache']"
    await update(actor)
    assert actor._llm.calls[-1] == "resume_generation"
    assert "frees no memory on platform 'cpu'" in reason


@pytest.mark.parametrize("fail", ["sleep 2", "wake ['weights']", "wake ['kv_cache']"])
async def test_an_engine_that_fails_to_change_is_unusable(actor, fail):
    actor._llm.fail = fail
    with pytest.raises(RuntimeError, match=r"its (falling asleep|waking up) failed: ValueError: no memory"):
        await actor.sleep()
        await actor.wake("weights")
        await actor.wake("kv_cache")
    assert not await actor.usable()


@pytest.fixture
def slot(monkeypatch):
    return Slot(monkeypatch)


async def cycle(slot, version=1, lasting=True):
    await slot.wake("weights")
    await slot.update(version, lasting)
    await slot.wake("kv_cache")


CYCLE = ["sleep", "wake", *UPDATE, "wake"]


async def test_a_cycle_without_accidents(slot):
    await slot.begin()
    for version in (1, 2):
        assert await slot.sleep() == "nothing freed"
        await cycle(slot, version)
        assert [call[1] for call in slot.calls if call[0] == "wake"] == ["weights", "kv_cache"]
        assert slot.names() == CYCLE


@pytest.mark.parametrize("moment", ["sleep", "asleep", "wake", "begin_update", "finish_update", "updated"])
async def test_an_engine_that_dies_comes_back_when_the_trainer_has_left(slot, moment):
    await slot.begin()
    first = slot.actor
    first.fail = moment
    await slot.sleep()
    if moment == "asleep":
        first.lost.set()
    await pause()
    await slot.wake("weights")
    await slot.update(4)
    if moment == "updated":
        first.lost.set()
    await pause()
    assert slot.actor is first and "start" not in slot.names()  # the device is the trainer's
    await slot.wake("kv_cache")
    assert slot.names() == ["listen", "start", *UPDATE, "serve"]
    assert slot.version == 4 and slot.restarts.count == 1
    await slot.sleep()
    await cycle(slot, 5)
    assert slot.names() == CYCLE


async def test_an_engine_that_is_coming_up_is_waited_for_and_sleeps_without_old_weights(slot):
    await slot.begin()
    await slot.update(1)
    slot.calls.clear()
    slot.may_start.clear()
    slot.actor.lost.set()
    await pause()
    sleeping = asyncio.create_task(slot.sleep())
    await pause()
    assert slot.names() == ["listen"] and not sleeping.done()
    slot.may_start.set()
    await sleeping
    assert slot.names() == ["start", "serve", "sleep"]
    await cycle(slot, 2)
    assert slot.version == 2 and slot.restarts.count == 1


async def test_weights_that_do_not_last_end_the_run_with_the_engine_that_slept(slot):
    await slot.begin()
    await slot.sleep()
    slot.actor.lost.set()
    await pause()
    with pytest.raises(RolloutFailed, match=r"engine 0 was lost and version 3 .* cannot be sent a second time"):
        await cycle(slot, 3, lasting=False)
