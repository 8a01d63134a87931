"""Slots of episode workers and the collector over them, with Ray actors that are not there."""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rollout_config import rollout_config
from test_collection import played, request
from waiting import until

pytest.importorskip("ray")

from ray.exceptions import RayActorError, RayTaskError

from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.cluster import restarts
from megatron_fleet.rollout import components
from megatron_fleet.rollout.collection import Collection
from megatron_fleet.rollout.collector import Collector
from megatron_fleet.rollout.components import ComponentLost, WorkerSlot
from megatron_fleet.rollout.requests import RolloutFailed

MISTAKE = RayTaskError("run", "Traceback\nValueError: a mistake", ValueError("a mistake"))
DOOMED = RayActorError(error_msg="The actor died because of an error raised in its creation task, ImportError")


class Actor:
    """A Ray handle of a worker.

    Attributes:
        calls: names and arguments, those of other actors of the slot among them.
        fail: what the calls of a name raise.
    """

    def __init__(self, number, calls):
        self.number, self.calls, self.fail = number, calls, {}
        self.playing = lambda spec: played(spec, 1.0)
        self.dead = None

    def __getattr__(self, name):
        async def call(*arguments):
            self.calls.append((self.number, name, *arguments))
            await asyncio.sleep(0)
            if name in self.fail:
                raise self.fail[name]
            if name == "play":
                return self.playing(*arguments)
            return self.dead if name == "policy_dead" else None

        return SimpleNamespace(remote=call)


class Slot(WorkerSlot):
    """A slot of such actors; ``made``: all that it had."""

    def __init__(self, name="worker 0", limit_s=300.0):
        self.made, self.calls, self.prepare = [], [], lambda actor: None
        numbers = itertools.count()

        def make():
            self.made.append(Actor(next(numbers), self.calls))
            self.prepare(self.made[-1])
            return self.made[-1]

        super().__init__(name, "worker.log", make, limit_s, limit_s)

    def names(self):
        return [call[1] for call in self.calls]


@pytest.fixture(autouse=True)
def killed(monkeypatch):
    found = []
    monkeypatch.setattr(components.ray, "kill", found.append)
    monkeypatch.setattr(restarts, "BACKOFF_S", 1e-4)
    return found


def one_spec():
    return Collection(request(1, 1), 0).take(1)[0]


async def test_a_worker_plays_what_it_is_given_and_is_told_what_it_must_know():
    slot = Slot()
    await slot.engine_moved("a", "b")  # there is nobody yet, who will read it when created
    await slot.forget_failures()
    await slot.start()
    assert slot.names() == ["__ray_ready__"]
    given = one_spec()
    assert (await slot.play(given)).task_key == "t0"
    await slot.engine_moved("a", "b")
    await slot.forget_failures()
    await slot.abort(7)
    assert slot.calls[1:] == [
        (0, "play", given), (0, "engine_moved", "a", "b"), (0, "forget_failures"), (0, "abort", 7)
    ]  # fmt: skip
    assert await slot.policy_dead() is None
    slot.made[0].dead = "the endpoint is gone"
    assert await slot.policy_dead() == "the endpoint is gone"
    for name in ("engine_moved", "forget_failures", "abort", "policy_dead"):
        slot.made[0].fail[name] = RayActorError()
    await asyncio.gather(slot.engine_moved("a", "b"), slot.forget_failures(), slot.abort(8))
    assert await slot.policy_dead() is None and len(slot.made) == 1


@pytest.mark.parametrize("error", [RayActorError(), TimeoutError()])
async def test_a_lost_worker_is_replaced_once_for_all_its_episodes(killed, error):
    slot = Slot()
    await slot.start()
    slot.made[0].fail["play"] = error
    outcomes = await asyncio.gather(*(slot.play(one_spec()) for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ComponentLost] * 3
    assert len(slot.made) == 2 and killed == [slot.made[0]] and slot.restarts.count == 1
    assert (await slot.play(one_spec())).reward == 1 and slot.calls[-1][0] == 1
    await slot.close()
    assert killed == slot.made


async def test_a_mistake_of_an_episode_is_no_loss():
    slot = Slot()
    await slot.start()
    slot.made[0].fail["play"] = MISTAKE
    with pytest.raises(RayTaskError):
        await slot.play(one_spec())
    assert len(slot.made) == 1


async def test_a_worker_that_hangs_is_lost_after_its_time():
    slot = Slot(limit_s=0.05)
    await slot.start()
    slot.made[0].playing = None
    hanging = asyncio.Event()

    async def never(*_):
        await hanging.wait()

    slot.made[0].play = SimpleNamespace(remote=never)
    with pytest.raises(ComponentLost, match="no answer in time"):
        await slot.play(one_spec())
    assert len(slot.made) == 2


async def test_a_worker_that_dies_while_it_starts_is_started_again_and_one_that_cannot_start_says_why(killed):
    slot = Slot()
    slot.prepare = lambda actor: actor.fail.update({"__ray_ready__": RayActorError()} if actor.number < 2 else {})
    await slot.start()
    assert len(slot.made) == 3 and killed == slot.made[:2]
    for error, said in ((MISTAKE, "ValueError: a mistake"), (DOOMED, "ImportError"), (TimeoutError(), "in time")):
        slot = Slot("worker 5")
        slot.prepare = lambda actor, error=error: actor.fail.update({"__ray_ready__": error})
        with pytest.raises(RolloutFailed, match=rf"^worker 5 did not start: .*{said}.* Its log is worker\.log\."):
            await slot.start()
        assert len(slot.made) == 1


async def test_a_worker_that_dies_again_and_again_is_given_up():
    slot = Slot()
    await slot.start()
    slot.prepare = lambda actor: actor.fail.update({"__ray_ready__": RayActorError()})
    slot.made[0].fail["play"] = RayActorError()
    with pytest.raises(RolloutFailed, match=r"worker 0 died 4 times, last: its process died\. Its log is worker\.log"):
        await slot.play(one_spec())
    assert slot.restarts.count == components.MAX_RESTARTS == 3


@pytest.mark.parametrize(
    ("error", "dead", "text"),
    [
        (RayActorError(), True, "its process died"),
        (DOOMED, False, "RayActorError: .*ImportError"),
        (components.ChildKilled("x"), True, "its process died"),
        (ComponentLost("host b is gone"), False, "host b is gone"),
        (TimeoutError("not within 3 s"), False, "not within 3 s"),
        (TimeoutError(), False, "no answer in time"),
        (ValueError("first\n  last line \n"), False, "ValueError: last line"),
        (KeyError(), False, "KeyError"),
    ],
)
def test_losses_are_told_from_failures_in_one_line(error, dead, text):
    assert components.died(error) == dead
    assert re.fullmatch(text, components.brief(error)), components.brief(error)


# The collector over slots


class Environment:
    """Environments that are always there."""

    losses, is_serving = 0, True

    def check(self):
        return self.losses

    async def serving(self):
        pass


class Engine:
    name = "engine 0"

    def __init__(self):
        self.checks = 0

    async def serving(self):
        pass

    async def check(self):
        self.checks += 1


async def opened(tmp_path, workers=2, **rollout):
    config, engine = rollout_config(tmp_path, **rollout), Engine()
    slots = [Slot(f"worker {number}") for number in range(workers)]
    for slot in slots:
        await slot.start()
    return Collector(config.rollout, config.env, [engine], slots, Environment()), slots, engine


def given_to(*slots):
    return [call[2] for slot in slots for call in slot.calls if call[1] == "play"]


async def test_all_workers_play_and_no_more_than_their_places(tmp_path):
    collector, slots, _ = await opened(tmp_path, episodes_in_flight=32)
    assert collector.load() == (0, 0)
    result = await collector.collect(request(tasks=8, samples=9))
    assert [len(group.trajectories) for group in result.groups] == [9] * 8 and result.accounting.known == 72
    assert len(given_to(*slots)) == 72 and min(len(given_to(slot)) for slot in slots) >= 72 // 4
    assert collector.load() == (0, 0)


async def test_a_place_is_free_when_its_episode_ends(tmp_path):
    """Not when others that began with it have ended, too: the longest of them may be ten times as long."""
    collector, slots, _ = await opened(tmp_path, workers=1, episodes_in_flight=4)
    gate, places = asyncio.Event(), collector._places

    async def wait(given):
        await gate.wait() if given.group == 0 else await asyncio.sleep(0)
        return played(given, 1.0)

    slots[0].made[0].play = SimpleNamespace(remote=wait)
    long = asyncio.create_task(collector.collect(request(tasks=1, samples=places - 1)))
    await until(lambda: collector.load()[0] == places - 1)
    short = await collector.collect(replace(request(tasks=20, samples=1), first=1))
    assert short.accounting.known == 20 and not long.done()
    gate.set()
    assert (await long).accounting.known == places - 1


async def test_places_are_what_is_under_way_and_the_rest_waits(tmp_path):
    collector, slots, _ = await opened(tmp_path, episodes_in_flight=6)
    gate, places = asyncio.Event(), collector._places
    for slot in slots:
        actor = slot.made[0]

        async def wait(given, actor=actor):
            actor.calls.append((0, "play", given))
            await gate.wait()
            return played(given, 1.0)

        actor.play = SimpleNamespace(remote=wait)
    first = asyncio.create_task(collector.collect(request(tasks=5, samples=2)))
    second = asyncio.create_task(collector.collect(request(tasks=1, samples=3)))
    await until(lambda: collector.load() == (places, 13 - places))
    assert 6 <= places < 13 and {spec.collection for spec in given_to(*slots)} == {0}
    gate.set()
    assert [r.accounting.known for r in await asyncio.gather(first, second)] == [10, 3]


async def test_episodes_of_a_lost_worker_are_played_again_and_count_as_lost(tmp_path):
    collector, slots, _ = await opened(tmp_path)
    slots[0].made[0].fail["play"] = RayActorError()
    result = await collector.collect(request(tasks=4, samples=4))
    assert result.accounting.known == 16 and result.accounting.aborted > 0 and result.accounting.retried == 0
    assert len(slots[0].made) == 2 and len(slots[1].made) == 1


async def test_a_dead_endpoint_stops_all_collections_and_later_ones(tmp_path):
    collector, slots, engine = await opened(tmp_path, workers=1)
    actor = slots[0].made[0]
    actor.playing = lambda spec: played(spec, None, Outcome.ABORTED)
    actor.dead = "401: no such key"
    result = await collector.collect(request(tasks=2, samples=2))
    assert collector.dead == "401: no such key" and engine.checks > 0
    assert result.accounting.known == 0 and (0, "abort", 0) in slots[0].calls
    before = len(given_to(*slots))
    later = await collector.collect(request(tasks=2, samples=2))
    assert later.accounting.unstarted == 4 and len(given_to(*slots)) == before


async def test_a_collection_that_is_cancelled_is_aborted_on_every_worker(tmp_path):
    collector, slots, _ = await opened(tmp_path)
    gate = asyncio.Event()

    async def wait(given):
        await gate.wait()
        return played(given, 1.0)

    for slot in slots:
        slot.made[0].play = SimpleNamespace(remote=wait)
    collecting = asyncio.create_task(collector.collect(request(tasks=4, samples=4)))
    await until(lambda: collector.load()[0] == 16)
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting
    assert all((0, "abort", 0) in slot.calls for slot in slots)
    gate.set()
    await until(lambda: collector.load() == (0, 0))


async def test_a_collection_over_its_budget_has_what_was_played(tmp_path):
    collector, slots, engine = await opened(tmp_path, workers=1, episodes_in_flight=2)
    actor, gate = slots[0].made[0], asyncio.Event()

    async def play(given):
        if given.group == 0:
            return played(given, 1.0)
        await gate.wait()
        return played(given, None, Outcome.ABORTED)

    async def abort(collection):
        gate.set()

    actor.play, actor.abort = SimpleNamespace(remote=play), SimpleNamespace(remote=abort)
    result = await collector.collect(replace(request(tasks=3, samples=1), budget_s=0.2))
    assert result.accounting.known == 1 and result.accounting.unstarted + result.accounting.unknown == 2
    assert engine.checks == 0  # nothing was lost


async def test_closing_fails_what_runs(tmp_path):
    collector, slots, _ = await opened(tmp_path)
    for slot in slots:
        slot.made[0].play = SimpleNamespace(remote=lambda given: asyncio.sleep(3600))
    collecting = asyncio.create_task(collector.collect(request()))
    await until(lambda: collector.load()[0] > 0)
    collector.close()
    with pytest.raises(RolloutFailed, match="the rollout was closed"):
        await collecting


async def test_training_and_evaluation_engines_have_collectors_and_places_of_their_own(tmp_path):
    collector, slots, _ = await opened(tmp_path, episodes_in_flight=6)
    config, own = rollout_config(tmp_path, episodes_in_flight=6), Engine()
    beside = Collector(config.rollout, config.env, [own], slots, Environment(), collector)
    gate = asyncio.Event()

    async def wait(given):
        await (gate.wait() if given.engines == "rollout" else asyncio.sleep(0))
        return played(given, 1.0 if given.group else None)

    for slot in slots:
        slot.made[0].play = SimpleNamespace(remote=wait)
    train = asyncio.create_task(collector.collect(request(tasks=9, samples=2)))
    await until(lambda: collector.load()[0] == collector._places)
    # All places of training are taken, and none of those of the evaluation.
    evaluation = await beside.collect(replace(request(tasks=9, samples=2), purpose="eval", engines="eval"))
    assert evaluation.accounting.known == 16 and evaluation.accounting.unknown == 2 and not train.done()
    gate.set()
    assert (await train).accounting.known == 16
    assert (
        beside.monitor.environments() == {} and sum(t.episodes for t in collector.monitor.environments().values()) > 36
    )


async def test_each_episode_goes_to_the_engines_that_it_is_for_and_collections_have_different_numbers(tmp_path):
    collector, slots, _ = await opened(tmp_path)
    config, own = rollout_config(tmp_path), Engine()
    beside = Collector(config.rollout, config.env, [own], slots, Environment(), collector)
    wanted = replace(request(tasks=3, samples=2), purpose="eval", engines="eval")
    await asyncio.gather(*(collector.collect(request(tasks=3, samples=2)) for _ in range(2)), beside.collect(wanted))
    specs = given_to(*slots)
    numbers = {kind: {spec.collection for spec in specs if spec.engines == kind} for kind in ("rollout", "eval")}
    assert len(numbers["rollout"]) == 2 and len(numbers["eval"]) == 1
    assert not numbers["rollout"] & numbers["eval"]
    assert all((spec.engines == "eval") == (not spec.trained) for spec in specs) and len(specs) == 18


async def test_a_lost_evaluation_engine_is_checked_by_its_own_collector_only(tmp_path):
    collector, slots, engine = await opened(tmp_path)
    config, own = rollout_config(tmp_path), Engine()
    beside = Collector(config.rollout, config.env, [own], slots, Environment(), collector)
    lost = iter([Outcome.ABORTED])
    for slot in slots:
        slot.made[0].playing = lambda spec: played(spec, 1.0, outcome=next(lost, Outcome.COMPLETED))
    wanted = replace(request(tasks=2, samples=1), purpose="eval", engines="eval")
    assert (await beside.collect(wanted)).accounting.aborted == 1
    assert (own.checks, engine.checks) == (1, 0)
