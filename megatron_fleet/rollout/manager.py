"""RolloutManager: owns the engines and the episode workers, and collects groups of trajectories from them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray

from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.config.schema import Config
from megatron_fleet.rollout import engine_actor
from megatron_fleet.rollout.budget import budget
from megatron_fleet.rollout.collection import Collection
from megatron_fleet.rollout.components import CALL_TIMEOUT_S, ComponentLost, EngineSlot, WorkerSlot
from megatron_fleet.rollout.logs import write_output_to
from megatron_fleet.rollout.requests import (
    CollectRequest,
    CollectResult,
    EpisodeSpec,
    Progress,
    RolloutStats,
    Weights,
)

BATCHES_PER_WORKER = 8
MAX_BATCH = 16
"""A batch frees its places when its last episode ends, so batches are small; each costs one Ray call."""
RUN_MARGIN_S = 60.0
"""Beyond the deadlines that an episode keeps by itself; a worker that takes longer hangs."""
WORKER_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rollout runs.

    Attributes:
        logs: folder of the log files.
        episode_python: interpreter of the episode environment.
        cuda: engines run on GPUs.
        token: the secret that engines ask for.
        env_vars: set in every process of the run.
    """

    logs: Path
    episode_python: Path
    cuda: bool
    token: str
    env_vars: dict[str, str]


class WorkerActor:
    """An EpisodeWorker as a Ray actor. The worker's module exists in the episode environment only."""

    def __init__(self, log: Path, *args: Any) -> None:
        write_output_to(log)
        from megatron_fleet.rollout.worker import EpisodeWorker

        self._worker = EpisodeWorker(*args)

    async def run(self, specs: Sequence[EpisodeSpec]) -> list[Trajectory]:
        return await self._worker.run(specs)

    async def abort(self) -> None:
        await self._worker.abort()


class RolloutManager:
    """A Ray actor, used by one RolloutService."""

    def __init__(self, config: Config, place: Place) -> None:
        write_output_to(place.logs / "rollout.log")
        self._config, self._place = config, place
        self._engines = [self._engine_slot(i) for i in range(config.rollout.engine.replicas)]
        self._listening = asyncio.Event()
        self._workers: list[WorkerSlot] = []
        self._collection: Collection | None = None
        self._init_info: dict[str, Any] = {}
        self._chunks: list[dict[str, Any]] = []

    async def start_engines(self) -> None:
        """Create the engines; returns when their addresses are known. They go on loading."""
        await asyncio.gather(*(engine.listen() for engine in self._engines))
        self._loading = asyncio.gather(*(engine.start() for engine in self._engines))
        self._listening.set()

    async def start_workers(self, env_url: str) -> None:
        """Create the workers and wait for everything, engines included. Raises RolloutFailed."""
        await self._listening.wait()
        self._workers = [self._worker_slot(i, env_url) for i in range(self._config.rollout.workers)]
        await asyncio.gather(self._loading, *(worker.start() for worker in self._workers))

    async def collect(self, request: CollectRequest) -> CollectResult:
        """Play every episode of ``request`` to its end. A failed episode is part of the result.

        Raises:
            RolloutFailed: a component died too often.
        """
        if self._collection is not None:
            raise RuntimeError("a collection is under way")
        started = time.monotonic()
        self._collection = collection = Collection(request, self._config.rollout.max_retries)
        try:
            if request.seed is not None:
                await asyncio.gather(*(e.call("forget_prefixes", timeout_s=CALL_TIMEOUT_S) for e in self._engines))
            async with budget(request.budget_s, partial(self._stop, collection)):
                await self._play(collection)
            return collection.result(time.monotonic() - started)
        finally:
            self._collection = None

    async def _stop(self, collection: Collection, reason: str) -> None:
        collection.stop(reason)
        await asyncio.gather(*(worker.abort() for worker in self._workers))

    def _lanes(self, episodes: int) -> tuple[list[WorkerSlot], int]:
        """One entry per batch that may be under way at a time, and the size of a batch."""
        rollout, ahead = self._config.rollout, self._config.env.provisioning.lookahead
        places = min(rollout.episodes_in_flight + ahead, max(episodes, 1))
        batch = min(MAX_BATCH, max(1, places // (len(self._workers) * BATCHES_PER_WORKER)))
        return [self._workers[i % len(self._workers)] for i in range(math.ceil(places / batch))], batch

    async def _play(self, collection: Collection) -> None:
        changed = asyncio.Condition()
        lanes, batch = self._lanes(collection.progress().total)
        try:
            async with asyncio.TaskGroup() as group:
                for worker in lanes:
                    group.create_task(self._lane(collection, worker, batch, changed))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the lanes fail together, for one reason

    async def _lane(self, collection: Collection, worker: WorkerSlot, batch: int, changed: asyncio.Condition) -> None:
        """Play one batch after the other on ``worker`` until nothing is left."""
        while not collection.done:
            await asyncio.gather(*(engine.serving() for engine in self._engines))
            specs = collection.take(batch)
            if not specs:
                async with changed:  # episodes of other lanes may come back to be played again
                    if not collection.done and not collection.waiting:
                        await changed.wait()
                continue
            await self._batch(collection, worker, specs)
            async with changed:
                changed.notify_all()

    async def _batch(self, collection: Collection, worker: WorkerSlot, specs: Sequence[EpisodeSpec]) -> None:
        try:
            trajectories = await worker.run(specs)
        except ComponentLost:
            for spec in specs:
                collection.lost(spec)
            return
        if any(trajectory.outcome == "aborted" for trajectory in trajectories):
            # Before they are issued again: a dead engine would fail them at once, a second and last time.
            await asyncio.gather(*(engine.check() for engine in self._engines))
        for spec, trajectory in zip(specs, trajectories, strict=True):
            collection.ended(spec, trajectory)

    async def kept(self, since: int) -> list[Trajectory]:
        """What came back in the collection under way, see ``Collection.kept``."""
        return self._collection.kept(since) if self._collection is not None else []

    async def progress(self) -> Progress:
        return self._collection.progress() if self._collection is not None else Progress(0, 0, 0)

    async def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Log-probs of ``sequences`` (int32 ``[T]`` each) by every engine: see ``EngineActor.score``."""
        timeout_s = self._config.rollout.engine.request_timeout_s
        calls = (engine.call("score", list(sequences), timeout_s=timeout_s) for engine in self._engines)
        return list(await asyncio.gather(*calls))

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        self._init_info = init_info
        await self._on_engines("init_weight_transfer", init_info)

    async def start_update(self) -> None:
        self._chunks = []
        await self._on_engines("start_update")

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        self._chunks.append(update_info)
        await self._on_engines("update_weights", update_info)

    async def finish_update(self, version: int) -> None:
        """Complete the update on every engine. Raises RolloutFailed unless all of them have it."""
        await self._on_engines("finish_update", version)
        # Shared memory keeps a version; CUDA IPC sends it through a buffer that is used again at once.
        weights = Weights(self._init_info, self._chunks, version, lasting=not self._place.cuda)
        await asyncio.gather(*(engine.settle(weights) for engine in self._engines))

    async def sleep(self) -> str | None:
        """Make all engines leave their devices; why one freed no memory, if so."""
        timeout_s = self._config.rollout.engine.update_timeout_s
        reasons = await asyncio.gather(*(engine.sleep(timeout_s) for engine in self._engines))
        return next((reason for reason in reasons if reason), None)

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """First ``weights``, then ``kv_cache``: all engines serve when that returns. Raises RolloutFailed."""
        timeout_s = self._config.rollout.engine.update_timeout_s
        await asyncio.gather(*(engine.wake(part, timeout_s) for engine in self._engines))

    async def _on_engines(self, method: str, *args: Any) -> None:
        """Call every engine that is part of the update; one that fails catches up in ``settle``."""
        timeout_s = self._config.rollout.engine.update_timeout_s
        await asyncio.gather(*(engine.update(method, *args, timeout_s=timeout_s) for engine in self._engines))

    async def stats(self) -> RolloutStats:
        engines = await asyncio.gather(*(engine.call("stats", timeout_s=CALL_TIMEOUT_S) for engine in self._engines))
        return RolloutStats(
            tokens=sum(e.tokens for e in engines),
            requests=sum(e.requests for e in engines),
            engine_cpu_seconds=sum(e.cpu_seconds for e in engines),
            restarts=sum(slot.restarts.count for slot in self._slots()),
        )

    async def endpoints(self) -> list[str]:
        return [engine.endpoint for engine in self._engines]

    async def processes(self) -> list[int]:
        """Pids of all engine processes."""
        pids = await asyncio.gather(*(e.call("processes", timeout_s=CALL_TIMEOUT_S) for e in self._engines))
        return [pid for some in pids for pid in some]

    async def close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self._slots()), return_exceptions=True)

    def _slots(self) -> list[EngineSlot | WorkerSlot]:
        return [*self._engines, *self._workers]

    def _engine_slot(self, index: int) -> EngineSlot:
        log, engine = self._place.logs / f"engine-{index}.log", self._config.rollout.engine
        options = {
            "num_cpus": 0,
            "num_gpus": engine.tensor_parallel if self._place.cuda else 0,
            "runtime_env": {"env_vars": self._place.env_vars | engine_actor.environment(self._place.cuda)},
        }

        def make() -> Any:
            actor = ray.remote(engine_actor.EngineActor)
            return actor.options(**options).remote(self._config, self._place.token, log)

        return EngineSlot(f"engine {index}", str(log), make, engine.start_timeout_s)

    def _worker_slot(self, index: int, env_url: str) -> WorkerSlot:
        rollout, env = self._config.rollout, self._config.env
        log = self._place.logs / f"worker-{index}.log"
        own = env.model_copy(update={"provisioning": env.provisioning.share(index, rollout.workers)})
        endpoints = [engine.endpoint for engine in self._engines]
        runtime_env = {
            "py_executable": str(self._place.episode_python),
            "env_vars": self._place.env_vars | {"OMP_NUM_THREADS": "1"},
        }

        def make() -> Any:
            actor = ray.remote(WorkerActor)
            return actor.options(num_cpus=0, runtime_env=runtime_env).remote(
                log,
                self._config.model.path,
                rollout.model_dump(),
                own.model_dump(),
                self._config.agent.model_dump(),
                env_url,
                endpoints,
                self._place.token,
            )

        # An environment that was started ahead waits for a place as long as another episode takes.
        episodes_s = 2 * (rollout.episode_timeout_s + env.verify_timeout_s)
        run_timeout_s = env.provisioning.wait_s + env.reset_timeout_s + episodes_s + RUN_MARGIN_S
        return WorkerSlot(f"worker {index}", str(log), make, WORKER_START_TIMEOUT_S, run_timeout_s)
