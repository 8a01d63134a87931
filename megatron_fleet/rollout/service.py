"""Rollout service: the controller's handle on engines, episode workers and environments."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_fleet.cluster.inventory import Inventory, local_inventory
from megatron_fleet.cluster.janitor import Janitor, marks
from megatron_fleet.cluster.joined_nodes import Nodes, RayHead
from megatron_fleet.cluster.placement import Placement, PlacementRequest, place
from megatron_fleet.config.schema import Config
from megatron_fleet.models.registry import family_environment
from megatron_fleet.rollout import ray_local
from megatron_fleet.rollout.engine_statistics import engine_metrics
from megatron_fleet.rollout.monitor import Load
from megatron_fleet.rollout.requests import CollectRequest, CollectResult, RolloutFailed

if TYPE_CHECKING:
    from megatron_fleet.agents.chat_client import Dialect
    from megatron_fleet.rollout.actors import ActorSettings
    from megatron_fleet.rollout.collection import OnEpisode
    from megatron_fleet.rollout.engine_slot import EngineGroup, Resend
    from megatron_fleet.rollout.pool import Pool

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutSite:
    """Hosts and placement of a rollout.

    Attributes:
        inventory: the hosts of the run, the controller's first.
        token: the run's secret, required on every socket.
        nodes: the hosts that join Ray; ``None``: there are none.
    """

    inventory: Inventory
    placement: Placement
    token: str
    nodes: Nodes | None = None

    @classmethod
    def alone(cls, wanted: PlacementRequest) -> RolloutSite:
        """Return this host alone, with all its devices for engines. Raises UserError when the engines do not fit."""
        inventory = local_inventory(os.environ)
        return cls(inventory, place(inventory, wanted), secrets.token_hex(32))


class RolloutService:
    """Owner of Ray, the environment server, the engines and the episode workers.

    Use it as an async context manager. Entering returns before the engines are up, so that the trainer can start
    concurrently; the first call that needs them waits. Everything is cleaned up however the owning process ends, even
    if it is killed.

    Attributes:
        run_id: marks every process of this rollout (see `cluster.janitor`).
        engines: all engines of the rollout, as the receiver of a weight transport.
        eval_engines: those that play evaluations only, which take no part in updates of the others; there may be none.
        resend: resends the current weights to a restarted engine; set by the controller. Without it a restarted engine
            ends the run unless its transport is lasting.
        eval_resend: the same, of an evaluation engine.
    """

    engines: EngineGroup
    eval_engines: EngineGroup

    def __init__(
        self,
        config: Config,
        out: Path,
        episode_python: Path,
        site: RolloutSite | None = None,
        dialect: Dialect | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            out: logs go to ``out/logs``.
            episode_python: interpreter of the episode environment.
            site: hosts and placement; ``None``: this host alone, with all its devices.
            dialect: how `eval.endpoint` is asked, which then plays the episodes instead of engines.
        """
        self.run_id = secrets.token_hex(4)
        self.resend: Resend | None = None
        self.eval_resend: Resend | None = None
        self._config = config
        self._out, self._episode_python = out.resolve(), episode_python
        wanted = PlacementRequest.of_evaluation(config.rollout.engine)
        self._site = site or RolloutSite.alone(wanted if dialect is None else replace(wanted, engines=0))
        self._dialect = dialect
        self._cleanup = contextlib.AsyncExitStack()
        self._pool: Pool
        self._starting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RolloutService:
        try:
            await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    @property
    def dead(self) -> str | None:
        """Reason why the endpoint does not answer any more; ``None`` while it does."""
        return self._pool.collector.dead

    async def wait_ready(self) -> None:
        """Wait until engines and workers serve. Raises RolloutFailed when one cannot start."""
        if self._starting is None:
            raise RuntimeError("the rollout was not entered")
        await asyncio.shield(self._starting)

    async def collect(
        self,
        request: CollectRequest,
        on_episode: OnEpisode | None = None,
        stop: asyncio.Event | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> CollectResult:
        """Play all episodes of ``request``. A failed episode is part of the result.

        Concurrent calls that are played by the same engines share ``rollout.episodes_in_flight``; free capacity goes to
        the earliest call. Cancelling a call stops only its own episodes.

        Args:
            on_episode: called with each episode when it has ended.
            stop: once it is set, what has not ended is given up as ``aborted``; environments are closed.
            on_start: called when the first episode is given to a worker; until then the request waits for a place.

        Raises:
            RolloutFailed: an engine or a worker died too often.
            EnvironmentFailed: the run's own environment server failed for too long.
        """
        await self.wait_ready()
        collector = self._pool.collector if request.engines == "rollout" else self._pool.eval_collector
        assert collector is not None, "there are no evaluation engines"
        return await collector.collect(request, on_episode, stop, on_start)

    async def environment_available(self) -> str | None:
        """Return why no environment is available now; ``None`` when a server answers, or there is none to probe.

        Raises:
            EnvironmentFailed: the run's own environment server was given up.
        """
        return await self._pool.environment.available()

    async def score(self, sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Score ``sequences`` (int32 ``[T]``) on every engine of the rollout at temperature 1: log-probs float32
        ``[T]``, first 0. Engines that leave meanwhile are left out.
        """
        await self.wait_ready()
        from megatron_fleet.rollout.components import ComponentLost

        timeout_s = self._config.rollout.engine.request_timeout_s
        scoring = (engine.score(sequences, timeout_s) for engine in self._pool.engines)
        scores = await asyncio.gather(*scoring, return_exceptions=True)
        for failed in scores:
            if isinstance(failed, BaseException) and not isinstance(failed, ComponentLost):
                raise failed
        return [score for score in scores if not isinstance(score, BaseException)]

    async def statistics(self) -> dict[str, float]:
        """Return the metrics of the rollout's engines and of their episodes in flight since the last call."""
        await self.wait_ready()
        engines = {"engine/engines": float(len(self._pool.engines))}
        return engines | engine_metrics(await self._pool.statistics()) | self._pool.collector.flight.metrics()

    def live(self) -> Load:
        """Return what engines and workers do now. Threads other than the event loop's may call it."""
        collector, evaluating = self._pool.collector, self._pool.eval_collector
        playing, waiting = collector.load()
        allowed = collector.flight.allowed if self._config.rollout.adapts else None
        engines = [*collector.monitor.engines, *([] if evaluating is None else evaluating.monitor.engines)]
        return Load(engines, collector.monitor.environments(), playing, waiting, allowed)

    async def sleep(self) -> str | None:
        """Put all engines to sleep, which discards their weights; returns the reason if one freed no memory.

        Raises:
            RolloutFailed: an engine was given up.
        """
        await self.wait_ready()
        from megatron_fleet.rollout.engine_slot import noted

        self._pool.asleep.start()
        reasons = await asyncio.gather(*(noted(engine, "sleep", engine.sleep()) for engine in self._pool.engines))
        return next((reason for reason in reasons if reason), None)

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Wake all engines: ``weights`` allocates weight memory, to be filled by a sync; ``kv_cache`` resumes serving.

        An engine that died while asleep has been restarted, with its weights, when the ``kv_cache`` call returns.

        Raises:
            RolloutFailed: an engine was given up.
        """
        await self.wait_ready()
        from megatron_fleet.rollout.engine_slot import noted

        await asyncio.gather(*(noted(engine, f"wake {part}", engine.wake(part)) for engine in self._pool.engines))
        if part == "kv_cache":
            self._pool.asleep.stop()

    async def _start(self) -> None:
        logs = self._out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        folder = ray_local.run_folder(self.run_id)
        janitor = Janitor(self.run_id, folder)
        self._cleanup.callback(janitor.close)
        if self._site.nodes is not None:
            # Runs after this process has left Ray, which would otherwise log the end of every node verbosely.
            self._cleanup.push_async_callback(self._site.nodes.leave)
        # No await inside: other coroutines would see the modified environment.
        with ray_local.children_environment(self.run_id) as inherited:
            head = self._start_ray(folder, logs)
        self._cleanup.callback(_leave_ray)
        self._cleanup.callback(janitor.look)
        from megatron_fleet.rollout.pool import Pool

        # Leftovers of a killed server are removed with the run's folder.
        variables = inherited | {"TMPDIR": str(folder)}
        settings, resends = self._actor_settings(logs, head), (lambda: self.resend, lambda: self.eval_resend)
        self._pool = Pool(self._config, settings, variables, resends[0], self.wait_ready, resends[1])
        self.engines, self.eval_engines = self._pool.group, self._pool.eval_group
        self._cleanup.push_async_callback(self._pool.close)
        watching = [asyncio.create_task(collector.monitor.watch()) for collector in self._pool.collectors]
        self._cleanup.push_async_callback(_end, *watching)
        serving = asyncio.create_task(self._pool.environment.start())
        self._starting = asyncio.create_task(self._start_pool(serving, head))
        self._cleanup.push_async_callback(_end, self._starting, serving)
        await asyncio.shield(serving)

    def _start_ray(self, folder: Path, logs: Path) -> RayHead | None:
        """Start Ray, with one retry: Ray's internal startup timeouts, some of 5 s, can expire on a busy host.

        Raises:
            RolloutFailed: both attempts failed.
        """
        for last in (False, True):
            try:
                return ray_local.start(self.run_id, folder, self._site.inventory.hosts[0].address)
            except Exception as error:
                ray_local.keep_logs(folder, logs)  # the folder is removed with this process
                lines = str(error).strip().splitlines() or [type(error).__name__]
                why = f"Ray did not start: {lines[-1]} Its logs are in {logs / 'ray'}."
                _leave_ray()
                if last:
                    raise RolloutFailed(why) from error
                log.warning("%s It is started again.", why)
        raise AssertionError("the second attempt returns or raises")

    async def _start_pool(self, serving: asyncio.Task[str], head: RayHead | None) -> None:
        hosts, nodes = self._site.inventory.hosts, self._site.nodes
        if nodes is not None:
            nodes.rollout_hosts = self._pool
            self._cleanup.callback(setattr, nodes, "rollout_hosts", None)
            if head is not None:
                await nodes.join(head, hosts[0].name)
            addresses = [host.address for host in hosts if host.rollout]
            await ray_local.wait_for_nodes(addresses, self._config.cluster.join_timeout_s)
        await self._pool.start(serving)

    def _actor_settings(self, logs: Path, head: RayHead | None) -> ActorSettings:
        from megatron_fleet.rollout.actors import ActorSettings

        # Temporary files of engines and workers are removed with the run's folder, present on every host we started.
        temporary = {} if head is None else ray_local.temporary_files_in(head.folder)

        return ActorSettings(
            logs=logs,
            episode_python=self._episode_python,
            token=self._site.token,
            env_vars=marks(self.run_id) | temporary | family_environment(self._config.model.family),
            engines=(*self._site.placement.engines, *self._site.placement.eval_engines),
            transport=self._site.placement.transport,
            inventory=self._site.inventory,
            dialect=self._dialect,
        )


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _leave_ray() -> None:
    import ray

    ray.shutdown()
