"""Engines that share the trainer's devices, with engines that are not there: order, and deaths at every moment."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config

from megatron_fleet.rollout import components, engine_actor
from megatron_fleet.rollout.components import EngineSlot
from megatron_fleet.rollout.requests import RolloutFailed, Weights

VERBS = [("init_weight_transfer", {}), ("start_update",), ("update_weights", {"round": 1}), ("finish_update", 1)]


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

    async def sleep(self, level):
        await self.__getattr__(f"sleep {level}")()
        self.asleep = {"weights", "kv_cache"}

    async def wake_up(self, tags):
        await self.__getattr__(f"wake {tags}")()
        self.asleep -= set(tags)
        return not self.asleep


@pytest.fixture
def actor(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_actor, "write_output_to", lambda log: None)
    made = engine_actor.EngineActor(rollout_config(tmp_path), "", tmp_path / "log")
    made._llm = FakeLlm()
    return made


async def test_an_update_in_sleep_does_not_let_the_engine_go_on(actor):
    reason = await actor.sleep()
    await actor.wake("weights")
    for verb, *arguments in VERBS:
        await getattr(actor, verb)(*arguments)
    assert "resume_generation" not in actor._llm.calls
    await actor.wake("kv_cache")  # in vLLM this one resumes
    assert actor._llm.calls[:2] == ["sleep 2", "wake ['weights']"]
    assert actor._llm.calls[-1] == "wake ['kv_cache']"
    for verb, *arguments in VERBS:
        await getattr(actor, verb)(*arguments)
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


class FakeActor:
    """A Ray handle of an engine that obeys when ``may_start``; ``fail`` names a call under which it dies."""

    def __init__(self, calls, may_start):
        self.calls, self.may_start, self.lost, self.fail = calls, may_start, asyncio.Event(), ""

    def __getattr__(self, name):
        async def call(*args):
            if name == "watch":
                await self.lost.wait()
                return "killed"
            if name == "start":
                await self.may_start.wait()
            self.calls.append(" ".join([name, *(a for a in args if isinstance(a, str))]))
            if name == self.fail:
                self.lost.set()
                raise components.RayError("its process died")
            return {"listen": "127.0.0.1:1", "sleep": "nothing freed"}.get(name)

        return type("Method", (), {"remote": staticmethod(call)})


@pytest.fixture
def slot(monkeypatch):
    monkeypatch.setattr(components, "BACKOFF_S", 0.0)
    monkeypatch.setattr(components.ray, "kill", lambda actor: None)
    calls, may_start = [], asyncio.Event()
    may_start.set()
    made = EngineSlot("engine 0", "log", lambda: FakeActor(calls, may_start), 5.0)
    made.calls, made.may_start = calls, may_start
    return made


async def start(slot):
    await slot.listen()
    await slot.start()
    slot.calls.clear()


async def publish(slot, version=1, lasting=True):
    for verb, *arguments in [*VERBS[:-1], ("finish_update", version)]:
        await slot.update(verb, *arguments, timeout_s=5)
    await slot.settle(Weights({}, [{"round": 1}], version, lasting))


async def cycle(slot, version=1, lasting=True):
    await slot.wake("weights", 5)
    await publish(slot, version, lasting)
    await slot.wake("kv_cache", 5)


async def pause():
    for _ in range(20):
        await asyncio.sleep(0.002)


UPDATE = ["init_weight_transfer", "start_update", "update_weights", "finish_update"]


async def test_a_cycle_without_accidents(slot):
    await start(slot)
    for version in (1, 2):
        assert await slot.sleep(5) == "nothing freed"
        await cycle(slot, version)
        assert slot.calls == ["sleep", "wake weights", *UPDATE, "wake kv_cache"]
        slot.calls.clear()


@pytest.mark.parametrize("moment", ["sleep", "asleep", "wake", "start_update", "finish_update", "published"])
async def test_an_engine_that_dies_comes_back_when_the_trainer_has_left(slot, moment):
    await start(slot)
    first = slot._actor
    first.fail = moment
    await slot.sleep(5)
    if moment == "asleep":
        first.lost.set()
    await pause()
    await slot.wake("weights", 5)
    await publish(slot, 4)
    if moment == "published":
        first.lost.set()
    await pause()
    assert slot._actor is first and "start" not in slot.calls  # the device is the trainer's
    slot.calls.clear()
    await slot.wake("kv_cache", 5)
    assert slot.calls == ["listen", "start", *UPDATE, "serve"]
    assert slot._version == 4 and slot.restarts.count == 1
    slot.calls.clear()
    await slot.sleep(5)
    await cycle(slot, 5)
    assert slot.calls == ["sleep", "wake weights", *UPDATE, "wake kv_cache"]


async def test_an_engine_that_is_coming_up_is_waited_for_before_it_sleeps(slot):
    await start(slot)
    await publish(slot, 1)
    slot.calls.clear()
    slot.may_start.clear()
    slot._actor.lost.set()
    await pause()
    sleeping = asyncio.create_task(slot.sleep(5))
    await pause()
    assert slot.calls == ["listen"] and not sleeping.done()
    slot.may_start.set()
    await sleeping
    assert slot.calls == ["listen", "start", *UPDATE, "serve", "sleep"]


async def test_weights_that_do_not_last_end_the_run_with_the_engine_that_slept(slot):
    await start(slot)
    await slot.sleep(5)
    slot._actor.lost.set()
    await pause()
    with pytest.raises(RolloutFailed, match=r"engine 0 was lost and version 3 .* cannot be sent a second time"):
        await cycle(slot, 3, lasting=False)
