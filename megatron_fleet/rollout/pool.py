"""Pool of the engines, episode workers and environments of one rollout, and the collector that uses them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from megatron_fleet.cluster.inventory import LOOPBACK, Host
from megatron_fleet.cluster.launcher import last_line
from megatron_fleet.cluster.placement import engines_of_joined
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.envs.registry import ServerStart, environment_token
from megatron_fleet.rollout.actors import ActorSettings, make_engine, make_worker
from megatron_fleet.rollout.collector import Collector
from megatron_fleet.rollout.components import ComponentLost, EnvironmentSlot, WorkerSlot, within
from megatron_fleet.rollout.engine_slot import EngineGroup, EngineSlot, Resend
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.rollout.ray_local import wait_for_nodes
from megatron_fleet.rollout.requests import RolloutFailed

RUN_MARGIN_S = 60.0
"""Added to the deadlines of an episode itself; a worker that takes longer counts as hung."""
WORKER_START_TIMEOUT_S = 120.0
TELL_S = 120.0
"""Seconds between two lines in the log about engines that have not started yet."""
log = logging.getLogger(__name__)


class _Both:
    """The slots of two collections that change."""

    def __init__(self, first: Iterable[EngineSlot], second: Iterable[EngineSlot]) -> None:
        self._first, self._second = first, second

    def __iter__(self) -> Iterator[EngineSlot]:
        return chain(self._first, self._second)


class Stopwatch:
    """Sum of several stretches of time."""

    def __init__(self) -> None:
        self._before, self._since = 0.0, math.nan

    def start(self) -> None:
        """Begin a stretch; without effect within one."""
        if math.isnan(self._since):
            self._since = time.monotonic()

    def stop(self) -> None:
        """End the stretch, if there is one."""
        self._before, self._since = self.seconds(), math.nan

    def seconds(self) -> float:
        """Return the sum so far, in seconds."""
        return self._before + (0.0 if math.isnan(self._since) else time.monotonic() - self._since)


class Pool:
    """Components of a rollout within a Ray cluster. `start` starts them; their slots restart those that die.

    Attributes:
        engines: those of the rollout.
        eval_engines: those that play evaluations only; there may be none.
        eval_collector: uses these, and the same workers; ``None`` without them.
        asleep: time that the engines have slept.
    """

    def __init__(
        self,
        config: Config,
        settings: ActorSettings,
        environment: Mapping[str, str],
        resend: Callable[[], Resend | None],
        ready: Callable[[], Awaitable[None]],
        eval_resend: Callable[[], Resend | None] = lambda: None,
    ) -> None:
        """
        Args:
            environment: environment variables of the environment server.
            resend: returns the function that resends weights to a restarted engine, if any.
            ready: returns once `start` has.
            eval_resend: the same as ``resend``, of an evaluation engine.
        """
        self._config, self._settings, self._resend = config, settings, resend
        self._url = ""
        self.asleep = Stopwatch()
        self._listening = asyncio.Event()
        kinds = [place.evaluation for place in settings.engines]
        self.engines = [self._engine_slot(i, resend) for i, evaluation in enumerate(kinds) if not evaluation]
        self.eval_engines = [self._engine_slot(i, eval_resend) for i, evaluation in enumerate(kinds) if evaluation]
        self._joining: dict[EngineSlot, asyncio.Task[None]] = {}
        self._departed = EngineStatistics()
        self._added = asyncio.Event()
        self.group = EngineGroup(_Both(self.engines, self._joining), ready)
        self.eval_group = EngineGroup(self.eval_engines, ready)
        self.workers = [self._worker_slot(i) for i in range(config.rollout.workers)]
        start = ServerStart(
            config.env,
            settings.logs / "env.log",
            str(settings.episode_python),
            config.run.seed,
            environment,
            settings.host,
            environment_token(settings.token),
        )
        self.environment = EnvironmentSlot(start, self._forget_failures)
        playing = self.workers, self.environment
        there = self._engines_there if config.rollout.engine.elastic else None
        self.collector = Collector(config.rollout, config.env, self.engines, *playing, engines_there=there)
        self.eval_collector: Collector | None = None
        if self.eval_engines:
            beside = self.collector
            self.eval_collector = Collector(config.rollout, config.env, self.eval_engines, *playing, beside)

    async def start(self, serving: asyncio.Task[str]) -> None:
        """Start engines and workers; returns when all of them serve.

        Args:
            serving: task that starts the environments and returns their address.

        Raises:
            RolloutFailed: an engine or worker cannot start.
            UserError: the environments cannot start.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._start_engines())
                group.create_task(self._start_workers(serving))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    @property
    def collectors(self) -> list[Collector]:
        return [self.collector] if self.eval_collector is None else [self.collector, self.eval_collector]

    async def close(self) -> None:
        """Stop all components within a few seconds."""
        for collector in self.collectors:
            collector.close()
        for joining in self._joining.values():
            joining.cancel()
        slots = (*self.engines, *self._joining, *self.eval_engines, *self.workers, self.environment)
        await asyncio.gather(*(slot.close() for slot in slots), return_exceptions=True)

    async def add_host(self, host: Host) -> None:
        """Add engines on a host that is joining Ray: they start, get the present weights and serve, while others serve.

        One that cannot start is left out, with a line in the log.
        """
        size = self._config.rollout.engine.tensor_parallel
        places = engines_of_joined(self._settings.inventory, host, size)
        if not places:
            log.warning(
                "host %s gets no engine: it has %d GPUs, an engine needs %d", host.name, len(host.devices), size
            )
        first = len(self._settings.engines)
        self._settings = self._settings.with_host(host, places)
        for slot in [self._engine_slot(first + i, self._resend, joining=True) for i in range(len(places))]:
            self._joining[slot] = asyncio.create_task(self._join(slot))

    async def _join(self, slot: EngineSlot) -> None:
        log.info("%s starts on host %s", slot.name, slot.host)
        try:
            await slot.join(self.group.latest, self.group.init_info, self.group.settled)
        except RolloutFailed as error:
            del self._joining[slot]
            log.warning("%s is left out: %s", slot.name, error)
            await slot.close()
            return
        # Nothing may run between the engine's last check for an update and here.
        del self._joining[slot]
        self.engines.append(slot)
        self.collector.add(slot)
        self._added.set()
        await self._engine_moved("", slot.endpoint)
        log.warning("%s on %s serves; there are %d engines", slot.name, slot.host, len(self.engines))

    async def release_host(self, name: str) -> None:
        """Move the requests of a host's engines to others, because the host leaves; its engines are gone then."""
        leaving = [slot for slot in self.engines if slot.host == self._address(name)]
        for slot in leaving:
            await asyncio.gather(*(worker.engine_leaves(slot.endpoint) for worker in self.workers))
            await slot.interrupt()
            await slot.sample()
        await self.remove_host(name)

    async def remove_host(self, name: str) -> None:
        """Remove the engines of a host that is lost or has left. Unless it was released, their requests are lost."""
        address = self._address(name)
        for slot in [slot for slot in self._joining if slot.host == address]:
            self._joining.pop(slot).cancel()
            slot.leave()
        for slot in [slot for slot in self.engines if slot.host == address]:
            self.engines.remove(slot)
            slot.leave()
            self.collector.remove(slot)
            self._departed += await slot.statistics()
            await self._engine_moved(slot.endpoint, "")
            log.warning("%s on %s has left; there are %d engines", slot.name, slot.host, len(self.engines))

    async def statistics(self) -> list[EngineStatistics]:
        """Return what each engine, and those that have left, counted since the last call."""
        counts = await asyncio.gather(*(engine.statistics() for engine in self.engines))
        departed, self._departed = self._departed, EngineStatistics()
        return [*counts, departed]

    def _address(self, host: str) -> str | None:
        """Return the address of a host that has joined; ``None`` of one whose engines were never added."""
        with contextlib.suppress(KeyError):
            return self._settings.inventory.host(host).address
        return None

    async def _engines_there(self) -> None:
        """Wait until there is an engine. Raises RolloutFailed when none joins in time."""
        limit = self._config.cluster.join_timeout_s
        while not self.engines:
            self._added.clear()
            log.warning("there is no engine; waiting for a host that runs `mfleet node --rollout-only`")
            try:
                await within(self._added.wait(), limit)
            except TimeoutError:
                raise RolloutFailed(
                    f"there was no engine for {limit:g} s (cluster.join_timeout_s); start `mfleet node "
                    f"--rollout-only` on a host, then run the same command again to resume."
                ) from None

    async def _start_engines(self) -> None:
        engines = (*self.engines, *self.eval_engines)
        await asyncio.gather(*(engine.listen() for engine in engines))
        self._listening.set()
        with self._telling_what_starts():
            await asyncio.gather(*(engine.start() for engine in engines))

    @contextlib.contextmanager
    def _telling_what_starts(self) -> Iterator[None]:
        """Within, log now and then which engines have not started yet, and the last line of the first one's log."""

        async def tell() -> None:
            waited = 0.0
            while True:
                await asyncio.sleep(TELL_S)
                waited += TELL_S
                late = [engine for engine in (*self.engines, *self.eval_engines) if not engine.is_serving]
                if late:
                    names = ", ".join(engine.name for engine in late)
                    with contextlib.suppress(OSError):  # on another host
                        names += f"; the end of {late[0].log}: {last_line(Path(late[0].log))}"
                    limit = self._config.rollout.engine.start_timeout_s
                    said = "not started after %.0f s of at most %g s (rollout.engine.start_timeout_s): %s"
                    log.warning(said, waited, limit, names)

        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            telling.cancel()

    async def _start_workers(self, serving: asyncio.Task[str]) -> None:
        self._url = await asyncio.shield(serving)
        await self._listening.wait()
        await asyncio.gather(*(worker.start() for worker in self.workers))

    async def _engine_moved(self, before: str, now: str) -> None:
        await asyncio.gather(*(worker.engine_moved(before, now) for worker in self.workers))

    async def _forget_failures(self) -> None:
        await asyncio.gather(*(worker.forget_failures() for worker in self.workers))

    def _engine_slot(self, index: int, resend: Callable[[], Resend | None], joining: bool = False) -> EngineSlot:
        engine, host = self._config.rollout.engine, self._settings.engine_host(index)

        async def make() -> object:
            if host != LOOPBACK:
                try:
                    await wait_for_nodes([host], self._config.cluster.join_timeout_s)
                except UserError as error:
                    raise ComponentLost(str(error)) from None
            return make_engine(self._config, self._settings, index)

        return EngineSlot(
            self._settings.engine_name(index),
            str(self._settings.engine_log(index)),
            make,
            host=host,
            start_timeout_s=engine.start_timeout_s,
            update_timeout_s=engine.update_timeout_s,
            on_move=self._engine_moved,
            resend=resend,
            joining=joining,
        )

    def _worker_slot(self, index: int) -> WorkerSlot:
        rollout, env = self._config.rollout, self._config.env
        # The retries of an endpoint extend an episode by up to its own deadline.
        playing_s = rollout.episode_timeout_s * (1 if self._settings.dialect is None else 2)
        # An environment that was started ahead waits up to one episode's duration for a free slot.
        episodes_s = 2 * (playing_s + env.verify_timeout_s)
        episode_timeout_s = env.provisioning.wait_s + env.reset_timeout_s + episodes_s + RUN_MARGIN_S

        def make() -> object:
            endpoints = [engine.endpoint for engine in (*self.engines, *self.eval_engines)]
            return make_worker(self._config, self._settings, index, self._url, endpoints)

        log = str(self._settings.logs / f"worker-{index}.log")
        slept = self.asleep.seconds
        return WorkerSlot(f"worker {index}", log, make, WORKER_START_TIMEOUT_S, episode_timeout_s, slept)
