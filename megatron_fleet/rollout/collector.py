"""Collector: plays collections, sharing the slots of the workers among the running ones."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.config.schema import Config
from megatron_fleet.rollout.collection import Collection
from megatron_fleet.rollout.components import ComponentLost, EnvironmentSlot, WorkerSlot
from megatron_fleet.rollout.engine_slot import EngineSlot
from megatron_fleet.rollout.requests import CollectRequest, CollectResult, EpisodeSpec, Progress, RolloutFailed

BATCHES_PER_WORKER = 8
MAX_BATCH = 16
"""A batch frees its slots when its last episode ends, so batches are small; each costs one Ray call."""
PROGRESS_INTERVAL_S = 0.5

OnProgress = Callable[[Progress], None]
OnEpisodes = Callable[[list[Trajectory]], None]


class _Running:
    """Running collection.

    Attributes:
        batch: most episodes that a worker gets at once.
        over: future that is done when every episode has returned, or holds the failure.
    """

    def __init__(self, collection: Collection, batch: int) -> None:
        self.collection, self.batch = collection, batch
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def look(self) -> None:
        """Set ``over`` if the collection is done."""
        if self.collection.done and not self.over.done():
            self.over.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class Collector:
    """Player of any number of concurrent collections. Free slots go to the earliest one that has waiting episodes.

    Attributes:
        dead: `Policy.dead` of the first worker that has a reason; all collections are stopped then.
    """

    def __init__(
        self,
        config: Config,
        engines: Sequence[EngineSlot],
        workers: Sequence[WorkerSlot],
        environment: EnvironmentSlot,
    ) -> None:
        """Args: engines, workers and environment are already started."""
        self._engines, self._workers, self._environment = engines, workers, environment
        self._max_retries = config.rollout.max_retries
        places = config.rollout.episodes_in_flight + config.env.provisioning.lookahead
        self._free = dict.fromkeys(workers, math.ceil(places / len(workers)))
        self._places = sum(self._free.values())
        self._numbers = itertools.count()
        self.dead: str | None = None
        self._plays: list[_Running] = []
        self._changed = asyncio.Event()
        self._handing_out: asyncio.Task[None] | None = None
        self._batches: set[asyncio.Task[None]] = set()

    async def collect(
        self, request: CollectRequest, on_progress: OnProgress | None = None, on_episodes: OnEpisodes | None = None
    ) -> CollectResult:
        """Play every episode of ``request``, see `RolloutService.collect`."""
        started = time.monotonic()
        collection = Collection(request, self._max_retries, next(self._numbers))
        play = _Running(collection, self._batch_size(collection))
        if self.dead is not None:
            collection.stop(self.dead)
        self._plays.append(play)
        self._hand_out_from_now_on()
        play.look()
        try:
            async with _budget(request.budget_s, partial(self._stop, play)):
                await _reported(play, on_progress, on_episodes)
            return collection.result(time.monotonic() - started)
        finally:
            self._plays.remove(play)
            self._changed.set()
            if not collection.done:
                await self._abort(collection)

    def close(self) -> None:
        """Fail the running collections."""
        for play in self._plays:
            play.fail(RolloutFailed("the rollout was closed"))
        for task in (self._handing_out, *self._batches):
            if task is not None:
                task.cancel()

    def _batch_size(self, collection: Collection) -> int:
        places = min(self._places, collection.waiting)
        return min(MAX_BATCH, max(1, places // (len(self._workers) * BATCHES_PER_WORKER)))

    def _hand_out_from_now_on(self) -> None:
        self._changed.set()
        if self._handing_out is None or self._handing_out.done():
            self._handing_out = asyncio.create_task(self._hand_out())

    async def _hand_out(self) -> None:
        """Assign free slots to waiting episodes while there are collections."""
        try:
            while self._plays:
                self._changed.clear()
                if self._waiting() is not None:
                    await asyncio.gather(*(engine.serving() for engine in self._engines), self._environment.serving())
                    while (play := self._waiting()) is not None and max(self._free.values()) > 0:
                        self._give_place(play)
                await self._changed.wait()
        except Exception as error:
            for play in self._plays:
                play.fail(error)

    def _waiting(self) -> _Running | None:
        return next((play for play in self._plays if play.collection.waiting), None)

    def _give_place(self, play: _Running) -> None:
        worker = max(self._free, key=lambda one: self._free[one])
        specs = play.collection.take(min(play.batch, self._free[worker]))
        self._free[worker] -= len(specs)
        task = asyncio.create_task(self._batch(play, worker, specs))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _batch(self, play: _Running, worker: WorkerSlot, specs: Sequence[EpisodeSpec]) -> None:
        try:
            await self._played(play.collection, worker, specs)
            play.look()
        except Exception as error:
            play.fail(error)
        finally:
            self._free[worker] += len(specs)
            self._changed.set()

    async def _played(self, collection: Collection, worker: WorkerSlot, specs: Sequence[EpisodeSpec]) -> None:
        losses = self._environment.check()
        try:
            trajectories = await worker.run(specs)
        except ComponentLost:
            for spec in specs:
                collection.lost(spec)
            return
        if any(trajectory.outcome is Outcome.ABORTED for trajectory in trajectories):
            # Before they are issued again: a dead engine would fail them immediately and repeatedly.
            await asyncio.gather(*(engine.check() for engine in self._engines))
            await self._check_policy(worker)
        environment_lost = self._environment.check() > losses
        for spec, trajectory in zip(specs, trajectories, strict=True):
            trajectory.check()
            if environment_lost and trajectory.reward is None:
                collection.lost(spec, trajectory)
            else:
                collection.ended(spec, trajectory)

    async def _check_policy(self, worker: WorkerSlot) -> None:
        if self.dead is None and (reason := await worker.policy_dead()) is not None:
            self.dead = reason
            await asyncio.gather(*(self._stop(play, reason) for play in self._plays))

    async def _stop(self, play: _Running, reason: str) -> None:
        play.collection.stop(reason)
        play.look()
        await self._abort(play.collection)

    async def _abort(self, collection: Collection) -> None:
        await asyncio.gather(*(worker.abort(collection.number) for worker in self._workers))


async def _reported(play: _Running, on_progress: OnProgress | None, on_episodes: OnEpisodes | None) -> None:
    """Wait until ``play`` is over, calling the callbacks periodically and at the end. Raises its failure."""
    reported = 0
    while True:
        over = bool((await asyncio.wait({play.over}, timeout=PROGRESS_INTERVAL_S))[0])
        if over:
            play.over.result()
        if on_progress is not None:
            on_progress(play.collection.progress())
        if on_episodes is not None and (ended := play.collection.kept(reported)):
            reported += len(ended)
            on_episodes(ended)
        if over:
            return


@asynccontextmanager
async def _budget(seconds: float | None, stop: Callable[[str], Awaitable[None]]) -> AsyncIterator[None]:
    """Await ``stop`` with the reason if the block takes longer than ``seconds``; ``None``: no limit."""
    if seconds is None:
        yield
        return

    async def later() -> None:
        await asyncio.sleep(seconds)
        await stop(f"the budget of {seconds:g} s was over")

    stopping = asyncio.create_task(later())
    try:
        yield
    finally:
        stopping.cancel()
