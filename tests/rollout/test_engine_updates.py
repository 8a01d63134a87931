"""Weight updates and lost pictures as the engine actor and its slot see them, with engines that are not there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config

from megatron_fleet.agents.engine import EngineLost, SamplingParams
from megatron_fleet.agents.images import PlacedImage
from megatron_fleet.envs.base import Image
from megatron_fleet.rollout import components, engine_actor
from megatron_fleet.rollout.components import EngineSlot
from megatron_fleet.rollout.requests import RolloutFailed, Weights

UPDATE = {
    "init_weight_transfer": ({"path": "memory"},),
    "start_update": (),
    "update_weights": ({"round": 1},),
    "finish_update": (7,),
}
CALLS = {
    "init_weight_transfer": "init_weight_transfer_engine",
    "start_update": "start_weight_update",
    "update_weights": "update_weights",
    "finish_update": "finish_weight_update",
}
PICTURE = PlacedImage(0, 1, Image("image/png", b"file"), "digest")


class FakeLlm:
    """Records what vLLM is asked; fails where it is told to."""

    errored = False

    def __init__(self, fail: str = "") -> None:
        self.fail, self.calls, self.paused = fail, [], False

    def __getattr__(self, name):
        async def call(*args, **kwargs):
            self.calls.append(name)
            if name == self.fail:
                raise ValueError("checksum differs")
            if name == "pause_generation":
                assert kwargs == {"mode": "keep", "clear_cache": True}
                self.paused = True
            if name == "resume_generation":
                self.paused = False

        return call

    async def is_paused(self):
        return self.paused


@pytest.fixture
def actor(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_actor, "write_output_to", lambda log: None)
    made = engine_actor.EngineActor(rollout_config(tmp_path), "", tmp_path / "log")
    made._llm = FakeLlm()
    return made


async def test_generation_stops_before_the_first_byte_and_goes_on_after_the_version(actor):
    for verb, arguments in UPDATE.items():
        await getattr(actor, verb)(*arguments)
    assert actor._llm.calls == [
        "init_weight_transfer_engine",
        "pause_generation",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "resume_generation",
    ]
    assert await actor.usable()


@pytest.mark.parametrize("verb", ["update_weights", "finish_update"])
async def test_an_update_without_a_pause_is_impossible(actor, verb):
    with pytest.raises(RuntimeError, match="without start_update"):
        await getattr(actor, verb)(*UPDATE[verb])
    assert actor._llm.calls == []
    assert not await actor.usable()


@pytest.mark.parametrize("verb", UPDATE)
async def test_after_a_failure_the_engine_answers_nothing_and_takes_no_update(actor, verb):
    actor._llm.fail = CALLS[verb]
    with pytest.raises(RuntimeError, match="checksum differs"):
        for name, arguments in UPDATE.items():
            await getattr(actor, name)(*arguments)
    assert "resume_generation" not in actor._llm.calls
    assert not await actor.usable() and "checksum differs" in await actor.watch()
    made = len(actor._llm.calls)
    with pytest.raises(EngineLost, match="weight update failed"):
        await actor._generate([5, 6], SamplingParams(1.0, 4, (), 1), "s", [])
    with pytest.raises(EngineLost, match="weight update failed"):
        await actor.score([np.array([1, 2], np.int32)])
    for name, arguments in UPDATE.items():
        with pytest.raises(RuntimeError, match="checksum differs"):
            await getattr(actor, name)(*arguments)
    assert len(actor._llm.calls) == made


class FakeActor:
    """A Ray handle of an engine that obeys at once."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.lost, self.hang = calls, asyncio.Event(), ""

    def __getattr__(self, name):
        async def call(*args):
            if name == "watch":
                await self.lost.wait()
                return "killed"
            self.calls.append(name)
            if name == self.hang:
                await self.lost.wait()
                await asyncio.sleep(0.05)
                raise components.RayError("its process died")
            return "127.0.0.1:1" if name == "listen" else None

        return type("Method", (), {"remote": staticmethod(call)})


@pytest.fixture
def slot(monkeypatch):
    monkeypatch.setattr(components, "BACKOFF_S", 0.0)
    monkeypatch.setattr(components.ray, "kill", lambda actor: None)
    calls: list[str] = []
    made = EngineSlot("engine 0", "log", lambda: FakeActor(calls), 5.0)
    made.calls = calls
    return made


CAUGHT_UP = ["init_weight_transfer", "start_update", "update_weights", "finish_update", "serve"]


def weights(version: int, lasting: bool = True) -> Weights:
    return Weights({"path": "memory"}, [{"round": version}], version, lasting)


async def start(slot):
    await slot.listen()
    await slot.start()
    assert slot.calls == ["listen", "start", "serve"]


async def publish(slot, version: int, lasting: bool = True):
    for verb, arguments in (UPDATE | {"finish_update": (version,)}).items():
        await slot.update(verb, *arguments, timeout_s=5)
    await slot.settle(weights(version, lasting))


async def lose(slot):
    slot.calls.clear()
    slot._actor.lost.set()
    async with asyncio.timeout(5):
        while slot._serving.is_set():
            await asyncio.sleep(0)


async def test_a_new_engine_answers_after_it_has_the_weights(slot):
    await start(slot)
    await publish(slot, 1)
    await lose(slot)
    await slot.serving()
    assert slot.calls == ["listen", "start", *CAUGHT_UP]


async def test_a_new_engine_waits_for_the_update_under_way(slot):
    await start(slot)
    await publish(slot, 1)
    await slot.update("start_update", timeout_s=5)
    await lose(slot)
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert slot.calls == ["listen", "start"]  # version 1 is being overwritten
    await slot.settle(weights(2))
    assert slot.calls == ["listen", "start", *CAUGHT_UP]
    assert slot._version == 2


async def test_a_call_that_fails_late_does_not_take_the_next_engine(slot, monkeypatch):
    killed = []
    monkeypatch.setattr(components.ray, "kill", killed.append)
    await start(slot)
    first = slot._actor
    first.hang = "update_weights"
    await slot.update("start_update", timeout_s=5)
    update = asyncio.create_task(slot.update("update_weights", {"round": 1}, timeout_s=5))
    await asyncio.sleep(0)
    await lose(slot)
    await update  # fails when the place is filled again
    assert slot._actor is not first and set(map(id, killed)) == {id(first)}
    await slot.settle(weights(1))
    assert slot.restarts.count == 1 and slot._version == 1


async def test_weights_that_do_not_last_end_the_run_with_the_engine(slot):
    await start(slot)
    await publish(slot, 3, lasting=False)
    await lose(slot)
    with pytest.raises(RolloutFailed, match=r"engine 0 was lost and version 3 .* cannot be sent a second time"):
        await slot.serving()
    assert slot.calls == ["listen", "start"]


class FakeOutput:
    def __init__(self, finish_reason: str) -> None:
        completion = {"token_ids": [5], "finish_reason": finish_reason, "weight_versions": [], "routed_experts": None}
        self.outputs = [SimpleNamespace(logprobs=SimpleNamespace(logprobs=[0.0]), **completion)]


class FakeImages:
    made = 0

    async def make(self, prompt, images, salt):
        self.made += 1
        return prompt


@pytest.mark.parametrize(("failures", "attempts"), [(0, 1), (1, 2), (2, 2)])
async def test_a_request_whose_pictures_vllm_lost_is_made_once_more(actor, monkeypatch, failures, attempts):
    outputs = [FakeOutput("error")] * failures + [FakeOutput("length")]

    async def run(request, params):
        return outputs.pop(0)

    monkeypatch.setattr(actor, "_run", run)
    actor._images = FakeImages()
    params, images = SamplingParams(1.0, 1, ()), [PICTURE]
    if failures < 2:
        assert (await actor._generate([9], params, "s", images)).finish_reason == "length"
    else:
        with pytest.raises(EngineLost, match="2 times"):
            await actor._generate([9], params, "s", images)
    assert actor._images.made == attempts


async def test_a_model_that_sees_nothing_is_given_no_pictures(actor):
    with pytest.raises(ValueError, match="sees no pictures"):
        await actor._generate([9], SamplingParams(1.0, 1, ()), "s", [PICTURE])
    assert actor._llm.calls == []


async def test_sequences_with_pictures_are_not_scored(actor):
    actor._vision = SimpleNamespace(placeholder_id=9)
    with pytest.raises(ValueError, match="cannot be scored"):
        await actor.score([np.array([1, 2], np.int32), np.array([1, 9], np.int32)])
    assert actor._llm.calls == []
