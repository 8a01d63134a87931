"""Collector: plays collections, sharing the slots of the workers among the running ones."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.schema import EnvConfig, RolloutConfig
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.rollout.collection import Collection, OnEpisode
from megatron_fleet.rollout.components import ComponentLost, EnvironmentSlot, WorkerSlot
from megatron_fleet.rollout.engine_slot import EngineSlot
from megatron_fleet.rollout.flight import Flight
from megatron_fleet.rollout.monitor import EngineReading, RolloutMonitor
from megatron_fleet.rollout.requests import CollectRequest, CollectResult, EpisodeSpec, RolloutFailed

CHECK_AFTER_S = 0.05
"""Seconds from the first lost episode to the check of all components; episodes lost in between share that check."""


class _Running:
    """Running collection.

    Attributes:
        turn: `Collection.number` of the first collection of the same training step.
        over: future that is done when every episode has returned, or holds the failure.
    """

    def __init__(
        self, request: CollectRequest, collection: Collection, turn: int, on_start: Callable[[], None] | None
    ) -> None:
        self.request, self.collection, self.turn = request, collection, turn
        self._on_start = on_start
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, most: int) -> list[EpisodeSpec]:
        """Take episodes to play now, see `Collection.take`; calls ``on_start`` when it takes the first."""
        specs = self.collection.take(most)
        if specs and self._on_start is not None:
            self._on_start()
            self._on_start = None
        return specs

    def record(self, change: Callable[..., None], *arguments: Any) -> None:
        """Call a method of the collection. If the callback for ended episodes raises, this collection alone fails."""
        try:
            change(*arguments)
        except Exception as error:
            self.fail(error)
        self.finish_if_done()

    def finish_if_done(self) -> None:
        """Set ``over`` if the collection is done."""
        if self.collection.done and not self.over.done():
            self.over.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class Collector:
    """Player of any number of concurrent collections: each group of a training step, each evaluation. Free slots go to
    the earliest one that has waiting episodes; of the groups of one training step, to those expected to be the longest.
    Where a step waits for all its groups, this makes none of them more likely to be trained on; where it does not
    (``rollout.batch.window``), it gives long ones a start.

    Attributes:
        monitor: reads the engines, and is told of every attempt at an episode that returns.
        flight: bounds the episodes in flight, by what the monitor reads.
        dead: `Policy.dead` of the first worker that has a reason; all collections are stopped then.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        env: EnvConfig,
        engines: Sequence[EngineSlot],
        workers: Sequence[WorkerSlot],
        environment: EnvironmentSlot,
        beside: Collector | None = None,
        engines_there: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Engines, workers and environment are already started; engines may be added, see `add`, and leave.

        Args:
            beside: collector of the rollout's engines, if this one's are for evaluations. Both use the same workers,
                each in places of its own.
            engines_there: returns once there is an engine.
        """
        self._engines, self._workers, self._environment = engines, workers, environment
        self._engines_there = engines_there
        self._max_retries = rollout.max_retries
        self.flight = Flight(rollout, env, [engine.name for engine in engines], evaluation=beside is not None)
        self._free = dict.fromkeys(workers, math.ceil(self.flight.places / len(workers)))
        self._places = sum(self._free.values())
        # Workers know collections by number, and the live page shows environments, not who plays in them.
        self._numbers: Iterator[int] = itertools.count() if beside is None else beside._numbers
        self.monitor = RolloutMonitor(engines, self._read)
        self._tallies = self.monitor if beside is None else beside.monitor
        self._shown_as = "engines" if beside is None else "evaluation engines"
        self.dead: str | None = None
        self._running: list[_Running] = []
        self._changed = asyncio.Event()
        self._handing_out: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._plays: set[asyncio.Task[None]] = set()

    async def collect(
        self,
        request: CollectRequest,
        on_episode: OnEpisode | None = None,
        stop: asyncio.Event | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> CollectResult:
        """Play every episode of ``request``, see `RolloutService.collect`."""
        started = time.monotonic()
        collection = Collection(request, self._max_retries, next(self._numbers), on_episode)
        of_step = (one.turn for one in self._running if _of_one_step(one.request, request))
        running = _Running(request, collection, next(of_step, collection.number), on_start)
        if self.dead is not None:
            collection.stop(self.dead)
        self._running.append(running)
        self._hand_out_from_now_on()
        running.finish_if_done()
        try:
            async with _given_up(request.budget_s, stop, partial(self._stop, running)):
                await running.over
            return collection.result(time.monotonic() - started)
        finally:
            self._running.remove(running)
            self._changed.set()
            if not collection.done:
                await self._abort(collection)

    def add(self, engine: EngineSlot) -> None:
        """Count and read an engine from now on."""
        self.flight.add(engine.name)
        self.monitor.add(engine)
        self._changed.set()

    def remove(self, engine: EngineSlot) -> None:
        """Do not count and read an engine any more."""
        self.flight.remove(engine.name)
        self.monitor.remove(engine)

    def load(self) -> tuple[int, int]:
        """Return how many episodes workers have, and how many wait for a worker."""
        return self._places - sum(self._free.values()), self._waiting()

    def close(self) -> None:
        """Fail the running collections."""
        for running in self._running:
            running.fail(RolloutFailed("the rollout was closed"))
        for task in (self._handing_out, self._checking, *self._plays):
            if task is not None:
                task.cancel()

    def _hand_out_from_now_on(self) -> None:
        self._changed.set()
        if self._handing_out is None or self._handing_out.done():
            self._handing_out = asyncio.create_task(self._hand_out())

    async def _hand_out(self) -> None:
        """Assign free slots to waiting episodes while there are collections."""
        try:
            while self._running:
                self._changed.clear()
                if self._waiting():
                    if self._engines_there is not None:
                        await self._engines_there()
                    await asyncio.gather(*(engine.serving() for engine in self._engines), self._environment.serving())
                    if self._environment.is_serving:
                        self._give_places()
                    else:
                        self._changed.set()
                await self._changed.wait()
        except Exception as error:
            for running in self._running:
                running.fail(error)

    def _waiting(self) -> int:
        """Number of episodes that no worker has yet."""
        return sum(running.collection.waiting for running in self._running)

    def _read(self, reading: EngineReading) -> None:
        """Take an engine's newest reading, by which more episodes may play."""
        playing, waiting = self.load()
        self.flight.read(reading, playing, waiting)
        with_tools = max(0.0, playing - sum(reading.requests for reading in self.monitor.engines))
        values = {"playing": playing, "waiting for a worker": waiting, "outside of engines": with_tools}
        TIMELINE.sample(self._shown_as, "episodes", values)
        self._changed.set()

    def _spare(self) -> int:
        """Number of episodes that workers may get now."""
        free, limit = sum(self._free.values()), self.flight.limit
        return free if limit is None else min(free, limit - self.load()[0])

    def _in_turn(self) -> list[_Running]:
        """Return the collections with waiting episodes in the order in which they get free slots."""

        def place(one: _Running) -> tuple[int, bool, float]:
            request = one.request
            if request.follows is not None:
                return max((r.turn for r in self._running if _precedes(r.request, request)), default=-1), True, 0.0
            long_first = -self.flight.expected_tokens(request.tasks) if request.purpose == "train" else 0.0
            return one.turn, False, long_first

        return sorted((one for one in self._running if one.collection.waiting), key=place)

    def _give_places(self) -> None:
        """Give workers as many of the waiting episodes as they may have, the next one always to the freest worker."""
        places = self._spare()
        for running in self._in_turn():
            for spec in running.take(places):
                places -= 1
                worker = max(self._free, key=lambda one: self._free[one])
                self._free[worker] -= 1
                # Counted here and not when it starts: a server that dies in between loses this episode too.
                losses = self._environment.losses
                task = asyncio.create_task(self._play(worker, running, spec, losses))
                self._plays.add(task)
                task.add_done_callback(self._plays.discard)

    async def _play(self, worker: WorkerSlot, running: _Running, spec: EpisodeSpec, environment_losses: int) -> None:
        try:
            await self._played(worker, running, spec, environment_losses)
        except Exception as error:
            running.fail(error)
        finally:
            self._free[worker] += 1
            self._changed.set()

    async def _played(self, worker: WorkerSlot, running: _Running, spec: EpisodeSpec, environment_losses: int) -> None:
        try:
            trajectory = await worker.play(spec)
        except ComponentLost:
            running.record(running.collection.lost, spec)
            return
        if trajectory.outcome is Outcome.ABORTED and not running.collection.stopped:
            await self._check_components()
        environment_lost = self._environment.check() > environment_losses
        trajectory.check()
        self._tallies.returned(worker.name, trajectory)
        self.flight.returned(trajectory)
        if environment_lost and trajectory.reward is None:
            running.record(running.collection.lost, spec, trajectory)
        else:
            running.record(running.collection.ended, spec, trajectory)

    async def _check_components(self) -> None:
        """Check engines and policies before a lost episode is issued again: a dead engine would fail it immediately and
        repeatedly. Episodes that are lost within ``CHECK_AFTER_S`` share a check.
        """
        if self._checking is None:
            self._checking = asyncio.create_task(self._check())
        await asyncio.shield(self._checking)

    async def _check(self) -> None:
        await asyncio.sleep(CHECK_AFTER_S)
        self._checking = None
        await asyncio.gather(*(engine.check() for engine in self._engines))
        await asyncio.gather(*(self._check_policy(worker) for worker in self._workers))

    async def _check_policy(self, worker: WorkerSlot) -> None:
        if self.dead is None and (reason := await worker.policy_dead()) is not None:
            self.dead = reason
            await asyncio.gather(*(self._stop(running, reason) for running in self._running))

    async def _stop(self, running: _Running, reason: str) -> None:
        running.record(running.collection.stop, reason)
        await self._abort(running.collection)

    async def _abort(self, collection: Collection) -> None:
        await asyncio.gather(*(worker.abort(collection.number) for worker in self._workers))


def _of_one_step(one: CollectRequest, other: CollectRequest) -> bool:
    return one.purpose == other.purpose == "train" and one.step == other.step


def _precedes(one: CollectRequest, other: CollectRequest) -> bool:
    """Whether ``one`` is of a training step that ``other`` follows."""
    return one.purpose == "train" and other.follows is not None and one.step <= other.follows


@asynccontextmanager
async def _given_up(
    seconds: float | None, asked: asyncio.Event | None, stop: Callable[[str], Awaitable[None]]
) -> AsyncIterator[None]:
    """Await ``stop`` with the reason if the block takes longer than ``seconds``, or once ``asked`` is set; ``None``:
    never.
    """

    async def later(seconds: float) -> None:
        await asyncio.sleep(seconds)
        await stop(f"the budget of {seconds:g} s was over")

    async def when(asked: asyncio.Event) -> None:
        await asked.wait()
        await stop("it was not needed any more, or is played again after an update")

    watches = [] if seconds is None else [asyncio.create_task(later(seconds))]
    watches += [] if asked is None else [asyncio.create_task(when(asked))]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()
