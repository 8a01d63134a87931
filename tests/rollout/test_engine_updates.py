"""Weight updates and lost images as the engine actor and its slot see them, with engines that are not there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from fake_engines import INIT_INFO, UPDATE, Slot, actor_without_vllm, give, pause
from rollout_config import rollout_config
from waiting import HANG_S

from megatron_fleet.agents.token_engine import EngineLost, SamplingParams
from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.rollout.components import ComponentLost
from megatron_fleet.rollout.engine_slot import EngineGroup
from megatron_fleet.rollout.requests import RolloutFailed

CALLS = {
    "open_transport": "init_weight_transfer_engine",
    "begin_update": "start_weight_update",
    "load": "update_weights",
    "finish_update": "finish_weight_update",
}
PICTURE = PlacedImage(0, 1, Image("image/png", b"file"), "digest")


async def update(actor, *verbs):
    if "open_transport" in verbs:
        await actor.open_transport(INIT_INFO)
    if "begin_update" in verbs:
        await actor.begin_update()
    if "load" in verbs:
        await actor.load({"round": 1})
    if "finish_update" in verbs:
        await actor.finish_update(7)


class FakeLlm:
    """Records what vLLM is asked; fails where it should."""

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
    return actor_without_vllm(tmp_path, monkeypatch, rollout_config(tmp_path), FakeLlm())


async def test_generation_stops_before_the_first_byte_and_goes_on_after_the_version(actor):
    await update(actor, *UPDATE)
    assert actor._llm.calls == [
        "init_weight_transfer_engine",
        "pause_generation",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "resume_generation",
    ]
    assert await actor.usable()


@pytest.mark.parametrize("verb", ["load", "finish_update"])
async def test_an_update_without_a_pause_is_impossible(actor, verb):
    with pytest.raises(RuntimeError, match="without begin_update"):
        await update(actor, verb)
    assert actor._llm.calls == []
    assert not await actor.usable()


@pytest.mark.parametrize("verb", UPDATE)
async def test_after_a_failure_the_engine_answers_nothing_and_takes_no_update(actor, verb):
    actor._llm.fail = CALLS[verb]
    with pytest.raises(RuntimeError, match="checksum differs"):
        await update(actor, *UPDATE)
    assert "resume_generation" not in actor._llm.calls
    assert not await actor.usable() and "checksum differs" in await actor.watch()
    made = len(actor._llm.calls)
    with pytest.raises(EngineLost, match="weight update failed"):
        await actor._generate([5, 6], SamplingParams(1.0, 4, (), 1), "s", [])
    with pytest.raises(EngineLost, match="weight update failed"):
        await actor.score([np.array([1, 2], np.int32)])
    for name in UPDATE:
        with pytest.raises(RuntimeError, match="checksum differs"):
            await update(actor, name)
    assert len(actor._llm.calls) == made


@pytest.fixture
def slot(monkeypatch):
    return Slot(monkeypatch)


VLLM_LOG = """(EngineCore pid=7) ERROR 11-27 14:20:11 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-27 14:20:11 [core.py:1512] RuntimeError: Unsupported CPU attention: head_dim=16
(MainProcess pid=9) ERROR 11-27 14:20:11 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: see above
(MainProcess pid=9) WARNING 11-27 14:20:12 [utils.py:648] ValueError: no error of this process
"""


@pytest.mark.parametrize(
    ("log", "reason"), [(None, ""), ("", ""), (VLLM_LOG, ": RuntimeError: Unsupported CPU attention: head_dim=16")]
)
async def test_an_engine_whose_core_died_says_why(actor, tmp_path, log, reason):
    actor._llm.errored = True
    if log is not None:
        (tmp_path / "log").write_text(log)
    assert await actor.watch() == f"the engine's core process died{reason}"


async def test_a_new_engine_answers_after_it_has_the_weights(slot):
    await slot.begin()
    await slot.update(1)
    await slot.lose()
    await slot.serving()
    assert slot.moves == [("127.0.0.1:1", "127.0.0.1:2")]
    assert slot.calls == [
        ("listen", "127.0.0.1"),
        ("start",),
        ("open_transport", INIT_INFO),
        ("begin_update",),
        ("load", {"round": 1}),
        ("finish_update", 1),
        ("serve",),
    ]


async def test_a_new_engine_waits_for_the_update_under_way(slot):
    await slot.begin()
    await slot.update(1)
    await slot.begin_update()
    await slot.lose()
    await pause()
    assert slot.names() == ["listen", "start"]  # version 1 is being overwritten
    await slot.finish_update(2, {"round": 2})
    assert slot.calls[2] == ("load", {"round": 2})
    assert slot.names() == [*UPDATE, "serve"] and slot.version == 2


async def test_a_new_engine_takes_nothing_of_an_older_transport(slot):
    """The trainer was restarted: what it sent before is gone, whatever was promised."""
    await slot.begin()
    await slot.update(1)
    await slot.lose()
    await slot.open_transport({"path": "new memory"})
    await pause()
    assert slot.names() == ["listen", "start"]
    await slot.begin_update()
    await slot.load({"round": 9})
    await slot.finish_update(1, {"round": 9})  # a trainer that went back may use a number again
    assert slot.calls == [
        ("open_transport", {"path": "new memory"}),
        ("begin_update",),
        ("load", {"round": 9}),
        ("finish_update", 1),
        ("serve",),
    ]


async def test_a_call_that_fails_late_does_not_take_the_next_engine(slot):
    await slot.begin()
    first = slot.actor
    first.hang = "load"
    await slot.open_transport(INIT_INFO)
    await slot.begin_update()
    loading = asyncio.create_task(slot.load({"round": 1}))
    await asyncio.sleep(0)
    await slot.lose()
    await loading  # fails when the place is filled again
    assert slot.actor is not first and set(map(id, slot.killed)) == {id(first)}
    await slot.finish_update(1, {"round": 1})
    assert slot.restarts.count == 1 and slot.version == 1


async def test_weights_that_nobody_can_send_again_end_the_run_with_the_engine(slot):
    await slot.begin()
    await slot.update(3, lasting=False)
    await slot.lose()
    with pytest.raises(RolloutFailed, match=r"engine 0 was lost and version 3 .* cannot be sent a second time"):
        await slot.serving()
    assert slot.names() == ["listen", "start"]


async def send_again(receiver, version):
    await receiver.open_transport({"group": "new"})
    await receiver.begin_update()
    await receiver.load({"bucket": 0})
    await receiver.load({"bucket": 1})
    await receiver.finish_update(version, None)


async def test_weights_that_do_not_last_are_sent_again_to_the_engine_alone(slot):
    asked = []

    async def resend(receiver, version):
        asked.append(version)
        await send_again(receiver, version)

    slot.resend = resend
    await slot.begin()
    await slot.update(3, lasting=False)
    await slot.lose()
    await slot.serving()
    assert asked == [3] and slot.version == 3
    assert slot.names() == [
        "listen",
        "start",
        "open_transport",
        "begin_update",
        "load",
        "load",
        "finish_update",
        "serve",
    ]


@pytest.mark.parametrize("failure", ["raises", "sends nothing", "kills the engine"])
async def test_a_resend_that_fails_is_tried_again_with_another_engine(slot, failure):
    attempts = []

    async def resend(receiver, version):
        attempts.append(slot.actor)
        if len(attempts) == 1:
            if failure == "raises":
                raise ConnectionError("the trainer is busy dying")
            if failure == "sends nothing":
                return
            slot.actor.fail = "load"
        await send_again(receiver, version)

    slot.resend = resend
    await slot.begin()
    await slot.update(3, lasting=False)
    await slot.lose()
    await slot.serving()
    assert len(set(map(id, attempts))) == 2 and slot.version == 3 and slot.restarts.count == 2


async def test_a_resend_that_waits_is_overtaken_by_the_next_update(slot):
    """The trainer is busy with a step; when it sends the next version, the old one does not exist any more."""
    asked, waiting = [], asyncio.Event()

    async def resend(receiver, version):
        asked.append(version)
        if version == 3:
            waiting.set()
            await asyncio.Event().wait()
        await send_again(receiver, version)

    slot.resend = resend
    await slot.begin()
    await slot.update(3, lasting=False)
    await slot.lose()
    await asyncio.wait_for(waiting.wait(), HANG_S)
    await asyncio.wait_for(slot.update(4, lasting=False), HANG_S)
    assert asked == [3, 4] and slot.version == 4
    await slot.serving()


async def test_an_engine_that_fails_in_an_update_has_it_when_the_update_ends(slot):
    slot.resend = send_again
    await slot.begin()
    first = slot.actor
    first.fail = "load"
    await slot.update(1, lasting=False)
    assert slot.actor is not first and slot.version == 1
    assert "finish_update" not in [call[0] for call in slot.calls[: slot.calls.index(("listen", "127.0.0.1"))]]


class Joining:
    """An engine with version 1, and one that is to join it."""

    def __init__(self, monkeypatch):
        self.old, self.new = Slot(monkeypatch), Slot(monkeypatch, joining=True)
        self._slots = [self.old]
        self.group = EngineGroup(self._slots, pause)

    async def begin(self):
        await self.old.begin()
        await give(self.group, 1)

    async def join(self):
        """Begin to join; returns the task of it."""
        self._slots.append(self.new)
        joining = asyncio.create_task(self.new.join(self.group.latest, self.group.init_info, self.group.settled))
        await pause()
        return joining


@pytest.fixture
async def joined(monkeypatch):
    made = Joining(monkeypatch)
    await made.begin()
    yield made
    for slot in (made.old, made.new):
        await slot.close()


async def test_an_engine_joins_with_the_weights_of_the_others_and_their_updates_do_not_wait_for_it(joined):
    old, new, group = joined.old, joined.new, joined.group
    new.may_start.clear()
    joining = await joined.join()
    await asyncio.wait_for(give(group, 2), HANG_S)
    assert old.version == 2 and not joining.done()
    new.may_start.set()
    await asyncio.wait_for(joining, HANG_S)
    assert new.version == 2 and new.names() == ["listen", "start", *UPDATE, "serve"]
    await give(group, 3)
    assert new.version == old.version == 3 and new.names() == UPDATE
    new.actor.fail = "load"  # from now on updates do wait for it
    await give(group, 4)
    assert new.version == old.version == 4 and new.restarts.count == 1


async def test_an_engine_that_joins_during_an_update_waits_for_its_end(joined):
    await joined.group.begin_update()
    joining = await joined.join()
    assert joined.new.names() == ["listen", "start"]
    await joined.group.finish_update(2, {"round": 2})
    await joining
    assert joined.new.version == 2


async def test_nobody_waits_for_an_engine_that_leaves(monkeypatch):
    slots = [Slot(monkeypatch), Slot(monkeypatch)]
    group = EngineGroup(slots, pause)
    for slot in slots:
        await slot.begin()
    lost, kept = slots
    lost.may_start.clear()
    await lost.lose()
    waiting = [asyncio.create_task(lost.serving()), asyncio.create_task(give(group, 1))]
    cancelled = asyncio.create_task(lost.serving())
    await pause()
    assert not any(task.done() for task in (*waiting, cancelled))
    lost.leave()
    cancelled.cancel()
    await asyncio.wait_for(asyncio.gather(*waiting), HANG_S)
    assert (kept.version, lost.version) == (1, None)
    with pytest.raises(ComponentLost, match="engine 0 has left"):
        await lost.sampled_tokens()
    await give(group, 2)
    assert kept.version == 2 and lost.gone and not lost.is_serving
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await kept.close()


async def test_an_engine_that_is_to_leave_answers_what_it_has_as_interrupted(actor, monkeypatch):
    stopped = asyncio.Event()

    async def pause_generation(**how):
        assert how == {"mode": "abort", "clear_cache": False}
        stopped.set()

    async def run(name, request, params):
        await stopped.wait()
        output = FakeOutput("abort")
        output.outputs[0].logprobs = SimpleNamespace(logprobs=[-1.0])
        return output

    monkeypatch.setattr(actor._llm, "pause_generation", pause_generation, raising=False)
    monkeypatch.setattr(actor, "_run", run)
    turn = asyncio.create_task(actor._generate([1], SamplingParams(1.0, 4, (), 1), "s", ()))
    await pause()
    await actor.interrupt()
    got = await turn
    assert (got.finish_reason, got.token_ids.tolist()) == ("interrupted", [5])
    later = await actor._generate([1], SamplingParams(1.0, 4, (), 1), "s", ())
    assert (later.finish_reason, len(later.token_ids)) == ("interrupted", 0)


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
async def test_a_request_whose_images_vllm_lost_is_made_once_more(actor, monkeypatch, failures, attempts):
    outputs = [FakeOutput("error")] * failures + [FakeOutput("length")]

    async def run(name, request, params):
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


async def test_a_model_that_sees_nothing_is_given_no_images(actor):
    with pytest.raises(ValueError, match="is a model without vision"):
        await actor._generate([9], SamplingParams(1.0, 1, ()), "s", [PICTURE])
    assert actor._llm.calls == []


async def test_sequences_with_images_are_not_scored(actor):
    actor._vision = SimpleNamespace(placeholder_id=9)
    with pytest.raises(ValueError, match="cannot be scored"):
        await actor.score([np.array([1, 2], np.int32), np.array([1, 9], np.int32)])
    assert actor._llm.calls == []
