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
from megatron_fleet.rollout.monitor import RolloutMonitor
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

    def finish_if_done(self) -> None:
        """Set ``over`` if the collection is done."""
        if self.collection.done and not self.over.done():
            self.over.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


class Collector:
    """Player of any number of concurrent collections. Free slots go to the earliest one that has waiting episodes.

    Attributes:
        monitor: is told of every attempt at an episode that returns.
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
        self.monitor = RolloutMonitor(engines)
        self.dead: str | None = None
        self._running: list[_Running] = []
        self._changed = asyncio.Event()
        self._handing_out: asyncio.Task[None] | None = None
        self._batches: set[asyncio.Task[None]] = set()

    async def collect(
        self, request: CollectRequest, on_progress: OnProgress | None = None, on_episodes: OnEpisodes | None = None
    ) -> CollectResult:
        """Play every episode of ``request``, see `RolloutService.collect`."""
        started = time.monotonic()
        collection = Collection(request, self._max_retries, next(self._numbers))
        running = _Running(collection, self._batch_size(collection))
        if self.dead is not None:
            collection.stop(self.dead)
        self._running.append(running)
        self._hand_out_from_now_on()
        running.finish_if_done()
        try:
            async with _budget(request.budget_s, partial(self._stop, running)):
                await _reported(running, on_progress, on_episodes)
            return collection.result(time.monotonic() - started)
        finally:
            self._running.remove(running)
            self._changed.set()
            if not collection.done:
                await self._abort(collection)

    def load(self) -> tuple[int, int]:
        """Return how many episodes workers have, and how many wait for a worker."""
        return self._places - sum(self._free.values()), sum(one.collection.waiting for one in self._running)

    def close(self) -> None:
        """Fail the running collections."""
        for running in self._running:
            running.fail(RolloutFailed("the rollout was closed"))
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
            while self._running:
                self._changed.clear()
                if self._waiting() is not None:
                    await asyncio.gather(*(engine.serving() for engine in self._engines), self._environment.serving())
                    while (running := self._waiting()) is not None and max(self._free.values()) > 0:
                        if not self._environment.is_serving:
                            self._changed.set()
                            break
                        self._give_place(running)
                await self._changed.wait()
        except Exception as error:
            for running in self._running:
                running.fail(error)

    def _waiting(self) -> _Running | None:
        return next((running for running in self._running if running.collection.waiting), None)

    def _give_place(self, running: _Running) -> None:
        worker = max(self._free, key=lambda one: self._free[one])
        specs = running.collection.take(min(running.batch, self._free[worker]))
        self._free[worker] -= len(specs)
        # Counted here and not when the batch starts: a server that dies in between loses these episodes too.
        losses = self._environment.losses
        task = asyncio.create_task(self._batch(running, worker, specs, losses))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _batch(
        self, running: _Running, worker: WorkerSlot, specs: Sequence[EpisodeSpec], environment_losses: int
    ) -> None:
        try:
            await self._played(running.collection, worker, specs, environment_losses)
            running.finish_if_done()
        except Exception as error:
            running.fail(error)
        finally:
            self._free[worker] += len(specs)
            self._changed.set()

    async def _played(
        self, collection: Collection, worker: WorkerSlot, specs: Sequence[EpisodeSpec], environment_losses: int
    ) -> None:
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
        environment_lost = self._environment.check() > environment_losses
        for spec, trajectory in zip(specs, trajectories, strict=True):
            trajectory.check()
            self.monitor.returned(worker.name, trajectory)
            if environment_lost and trajectory.reward is None:
                collection.lost(spec, trajectory)
            else:
                collection.ended(spec, trajectory)

    async def _check_policy(self, worker: WorkerSlot) -> None:
        if self.dead is None and (reason := await worker.policy_dead()) is not None:
            self.dead = reason
            await asyncio.gather(*(self._stop(running, reason) for running in self._running))

    async def _stop(self, running: _Running, reason: str) -> None:
        running.collection.stop(reason)
        running.finish_if_done()
        await self._abort(running.collection)

    async def _abort(self, collection: Collection) -> None:
        await asyncio.gather(*(worker.abort(collection.number) for worker in self._workers))


async def _reported(running: _Running, on_progress: OnProgress | None, on_episodes: OnEpisodes | None) -> None:
    """Wait until ``running`` is over, calling the callbacks periodically and at the end. Raises its failure."""
    reported = 0
    while True:
        over = bool((await asyncio.wait({running.over}, timeout=PROGRESS_INTERVAL_S))[0])
        if over:
            running.over.result()
        if on_progress is not None:
            on_progress(running.collection.progress())
        if on_episodes is not None and (ended := running.collection.kept(reported)):
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
