"""The bound of the episodes in flight and the order of those that wait, in the collector."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rollout_config import rollout_config
from test_collection import played, request
from waiting import HANG_S, until

from megatron_fleet.data.task import Task
from megatron_fleet.rollout.concurrency import CUT, START
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.rollout.flight import Flight
from megatron_fleet.rollout.monitor import EngineReading
from megatron_fleet.telemetry.registry import find

pytest.importorskip("ray")

from megatron_fleet.rollout.collector import Collector

LOOKAHEAD = 4
FULL = EngineStatistics(steps=1, running=START, kv_usage=1.0, most_kv_usage=1.0, preemptions=9)


def config(episodes="auto", **rollout):
    return rollout_config(Path("none"), episodes_in_flight=episodes, **rollout)


def flight(engines=1, **rollout) -> Flight:
    made = config(**rollout)
    return Flight(made.rollout, made.env, [f"engine {number}" for number in range(engines)])


class Engine:
    """An engine that serves."""

    is_serving = True

    def __init__(self, number):
        self.name = f"engine {number}"

    async def serving(self):
        return None


class Environments:
    """Environments that are never lost."""

    is_serving, losses = True, 0

    async def serving(self):
        return None

    def check(self):
        return 0


class Worker:
    """A worker whose episodes end when they are told to; ``began``: those that it was given."""

    name = "worker 0"

    def __init__(self):
        self.began = []
        self.playing = 0
        self._ends = asyncio.Semaphore(0)

    async def play(self, spec):
        self.began.append(spec)
        self.playing += 1
        await self._ends.acquire()
        self.playing -= 1
        return played(spec, 1.0)

    def end(self, episodes):
        for _ in range(episodes):
            self._ends.release()


def collector_of(worker, engines=1, **rollout) -> Collector:
    made = config(**rollout)
    return Collector(made.rollout, made.env, [Engine(number) for number in range(engines)], [worker], Environments())


def test_a_number_bounds_nothing_but_the_places():
    fixed = flight(episodes=7)
    assert (fixed.places, fixed.allowed, fixed.limit) == (7 + LOOKAHEAD, 7, None)
    fixed.read(EngineReading("engine 0", True, FULL), in_flight=7, waiting=1)
    assert fixed.allowed == 7 and fixed.limit is None


@pytest.mark.parametrize("engines, rollout", [(0, {}), (1, {"sampler": "hosted"}), (1, {"sampler": "package:Sampler"})])
def test_without_engines_to_observe_auto_is_a_number(engines, rollout):
    found = flight(engines, **rollout)
    assert (found.places, found.allowed, found.limit) == (256 + LOOKAHEAD, 256, None)


def test_auto_begins_with_a_few_and_has_places_for_what_engines_decode_together():
    found = flight(3, engine={"replicas": 3, "max_num_seqs": 100})
    assert (found.places, found.allowed, found.limit) == (300 + LOOKAHEAD, 3 * START, 3 * START + LOOKAHEAD)
    assert flight(engine={"max_num_seqs": 10}).allowed == 10
    found.read(EngineReading("engine 1", False), in_flight=80, waiting=0)
    assert found.allowed == 2 * START


def test_engines_that_are_added_and_leave_change_how_many_play():
    found = flight(0, engine={"replicas": "auto", "colocated": False})
    assert found.limit == START + LOOKAHEAD and found.places > 4 * START  # no endpoint: engines may join
    for number in range(2):
        found.add(f"engine {number}")
    assert found.allowed == 2 * START
    found.remove("engine 0")
    assert found.allowed == START
    fixed = flight(0, episodes=7, engine={"replicas": "auto", "colocated": False})
    fixed.add("engine 0")
    fixed.remove("engine 0")
    assert (fixed.allowed, fixed.limit) == (7, None)


async def test_episodes_begin_when_an_engine_is_added(monkeypatch):
    made, worker, there = config(), Worker(), asyncio.Event()
    engines = []
    collector = Collector(made.rollout, made.env, engines, [worker], Environments(), engines_there=there.wait)
    collecting = asyncio.create_task(collector.collect(request(tasks=1, samples=2)))
    await asyncio.sleep(0.05)
    assert not worker.began
    engines.append(Engine(0))
    collector.add(engines[0])
    there.set()
    await until(lambda: worker.playing == 2)
    assert [reading.name for reading in collector.monitor.engines] == ["engine 0"]
    worker.end(2)
    await collecting
    collector.remove(engines[0])
    assert collector.monitor.engines == []


def test_environments_that_start_ahead_do_not_count_as_playing():
    found = flight()
    full = EngineReading("engine 0", True, FULL)
    found.read(full, in_flight=START + LOOKAHEAD, waiting=9)
    assert found.allowed == int(START * (1 - CUT))


def test_metrics_are_of_the_readings_since_they_were_asked_for_and_defined():
    found = flight()
    for episodes in (10, 0, 20):
        found.read(EngineReading("engine 0", True), in_flight=episodes, waiting=0)
    metrics = found.metrics()
    assert metrics == {"engine/episodes_allowed": START, "engine/episodes_in_flight_mean": 15}
    assert found.metrics() == {"engine/episodes_allowed": START}
    assert all(find(name) is not None for name in metrics)


def test_expected_lengths_are_of_the_task_or_else_of_its_environment():
    found = flight()
    known, other, foreign = (Task(key, "p", env, "") for key, env in (("a", "shop"), ("b", "shop"), ("a", "bank")))
    assert found.expected_tokens([known]) == float("inf")
    specs = [replace(spec, task=known) for spec in [_spec()] * 2]
    for spec, tokens in zip(specs, (10, 30), strict=True):
        found.returned(replace(played(spec, 1.0), token_ids=np.zeros(tokens, np.int32)))
    found.returned(replace(played(specs[0], None), token_ids=np.zeros(999, np.int32)))
    assert found.expected_tokens([known]) == found.expected_tokens([other]) == 20
    found.returned(replace(played(replace(specs[0], task=other), 1.0), token_ids=np.zeros(80, np.int32)))
    assert found.expected_tokens([known]) == 20 and found.expected_tokens([other]) == 80
    assert found.expected_tokens([Task("c", "p", "shop", "")]) == 40
    assert found.expected_tokens([foreign]) == float("inf")


def _spec():
    from megatron_fleet.rollout.collection import Collection

    return Collection(request(tasks=1, samples=1), 0).take(1)[0]


async def test_more_episodes_begin_only_when_engines_have_room():
    worker = Worker()
    collector = collector_of(worker)
    collecting = asyncio.create_task(collector.collect(request(tasks=200, samples=1)))
    await until(lambda: worker.playing == START + LOOKAHEAD)

    def read(counts):
        collector._read(EngineReading("engine 0", True, counts))

    read(FULL)
    less = int(START * (1 - CUT)) + LOOKAHEAD
    worker.end(START + LOOKAHEAD)  # all that play
    await until(lambda: worker.playing == less)
    assert collector.load() == (less, 200 - START - LOOKAHEAD - less)
    room = EngineStatistics(steps=1, running=10, kv_usage=0.1)
    worker.end(less)
    await until(lambda: len(worker.began) == START + LOOKAHEAD + 2 * less)
    read(room)  # the turnover that ends with it was full
    assert collector.load()[0] == less
    worker.end(less)
    await until(lambda: len(worker.began) == START + LOOKAHEAD + 3 * less)
    read(room)
    await until(lambda: worker.playing > less)
    worker.end(500)
    result = await asyncio.wait_for(collecting, HANG_S)
    assert result.accounting.known == 200


async def test_a_collection_starts_once_when_its_first_episode_has_a_place():
    worker, started = Worker(), []
    collector = collector_of(worker, episodes=1)
    first, second = (
        asyncio.create_task(
            collector.collect(request(tasks=1, samples=8, step=n), on_start=lambda n=n: started.append(n))
        )
        for n in (1, 2)
    )
    await until(lambda: len(worker.began) == 1 + LOOKAHEAD)
    assert started == [1]
    worker.end(16)
    await asyncio.wait_for(asyncio.gather(first, second), HANG_S)
    assert started == [1, 2]


async def test_groups_of_a_step_begin_with_the_longest_and_later_steps_and_evaluations_wait():
    worker = Worker()
    collector = collector_of(worker, episodes=1)
    for env, tokens in (("short", 5), ("long", 50), ("middle", 20)):
        spec = replace(_spec(), task=Task("earlier", "p", env, ""))
        collector.flight.returned(replace(played(spec, 1.0), token_ids=np.zeros(tokens, np.int32)))

    def group(env, step, purpose="train", follows=None):
        one = request(tasks=1, samples=2, step=step, purpose=purpose)
        one = replace(one, tasks=[Task(f"{env}-{step}", "p", env, "")], follows=follows)
        return asyncio.create_task(collector.collect(one))

    wanted = [("short", 1), ("long", 1), ("long", 9), ("new", 1), ("long", 2), ("middle", 1), ("short", 2)]
    groups = [group(env, step, "eval" if step == 9 else "train") for env, step in wanted]
    groups.append(group("beside", 8, "eval", follows=1))
    await until(lambda: len(worker.began) == 1 + LOOKAHEAD)
    worker.end(2 * len(groups))
    await asyncio.wait_for(asyncio.gather(*groups), HANG_S)
    order = list(Counter(spec.task.key for spec in worker.began))
    # The evaluation that was asked for last fills the places that step 1 leaves.
    assert order == ["new-1", "long-1", "middle-1", "short-1", "beside-8", "long-9", "long-2", "short-2"]
