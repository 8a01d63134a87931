"""A rollout for tests that are not coroutines: the service on an event loop of its own, and weights for its engines."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from local_sender import FolderWeights, LocalSender

from megatron_fleet.agents.token_engine import Engine, Generation, SamplingParams
from megatron_fleet.cluster.janitor import marked
from megatron_fleet.config.schema import Config
from megatron_fleet.data.dataset import load_tasks
from megatron_fleet.embedded_fleet.tasks import SHIPPED_TASKS
from megatron_fleet.rollout.engine_client import connect
from megatron_fleet.rollout.requests import CollectRequest, CollectResult
from megatron_fleet.rollout.service import RolloutService
from megatron_fleet.weight_sync.registry import make_transport

TIMEOUT_S = 600.0


class Rollout:
    """The service, the models whose weights it may be given, and the version that its engines have.

    Attributes:
        source: the weights that `sync` sends.
    """

    def __init__(self, service: RolloutService, models: Mapping[str, Path], loop: asyncio.AbstractEventLoop) -> None:
        self.service, self.models, self._loop = service, models, loop
        self.source = FolderWeights(next(iter(models.values())))
        self.transport = make_transport("shm")
        self.sender = LocalSender(self.source)
        self.version = 0

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.begin(work).result(TIMEOUT_S)

    def restarts(self) -> int:
        return self.run(restarts(self.service))

    def processes(self) -> list[int]:
        return self.run(engine_processes(self.service))

    def sync(self, name: str) -> None:
        """Give the engines the weights of a model, as the next version."""
        self.source.folder = self.models[name]
        self.version += 1
        self.run(self.transport.sync(self.sender, self.service.engines, self.version))

    def collect(self, tasks: int = 4, samples: int = 4, seed: int | None = 0, **callbacks: Any) -> CollectResult:
        return self.run(self.service.collect(request(tasks, samples, seed), **callbacks))

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Generation]:
        return self.run(self.answers(prompts, params))

    async def answers(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Any]:
        """Generations, or the exceptions in their place."""
        engine = await engine_of(self.service)
        calls = (engine.generate(p, q, str(i)) for i, (p, q) in enumerate(zip(prompts, params, strict=True)))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, ValueError):
                raise result
        return results


async def engine_of(service: RolloutService) -> Engine:
    """A client of the engines, for requests outside any episode."""
    await service.wait_ready()
    endpoints = [engine.endpoint for engine in service._pool.engines]
    return connect(endpoints, service._site.token, service._config.rollout.engine.health_timeout_s)


async def sampled_tokens(service: RolloutService) -> int:
    """Tokens that the engines have sampled since the start."""
    await service.wait_ready()
    return sum([await engine.sampled_tokens() for engine in service._pool.engines])


async def restarts(service: RolloutService) -> int:
    """Restarts of all components since the start, once all engines serve."""
    await service.wait_ready()
    pool = service._pool
    for engine in pool.engines:
        await engine.serving()
    return sum(slot.restarts.count for slot in (*pool.engines, *pool.workers, pool.environment))


def starting_core(run_id: str) -> int | None:
    """Pid of the core process of a run's first engine, once there is one."""
    for pid in marked(run_id):
        with contextlib.suppress(OSError):
            if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    return None


async def engine_processes(service: RolloutService) -> list[int]:
    """Pids of the engines' processes, their actors among them."""
    await service.wait_ready()
    return [pid for engine in service._pool.engines for pid in await engine.processes()]


def request(tasks: int = 4, samples: int = 4, seed: int | None = 0, **changes: Any) -> CollectRequest:
    rows = load_tasks(SHIPPED_TASKS)[:tasks]
    return CollectRequest(
        **{"step": 0, "temperature": 1.0, "purpose": "train", **changes}, tasks=rows, samples=samples, seed=seed
    )


@contextmanager
def running(config: Config, out: Path, python: Path, models: Mapping[str, Path]) -> Iterator[Rollout]:
    """A started rollout on this machine."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="rollout")
    thread.start()
    service = RolloutService(config, out, python)
    rollout = Rollout(service, models, loop)
    try:
        rollout.run(service.__aenter__())
        try:
            yield rollout
        finally:
            rollout.run(service.__aexit__(None, None, None))
            rollout.transport.close()
            rollout.sender.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
