"""Components of a rollout that are watched and replaced when they die: base classes, workers, environment server.

Each slot stands for one component (engine 0, worker 1, ...). Its process may be replaced without its users noticing.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.cluster.restarts import OutOfRestarts, Restarts
from megatron_fleet.config.errors import UserError
from megatron_fleet.envs.embedded_server import ServerKilled
from megatron_fleet.envs.registry import Server, ServerStart, no_answer, serve
from megatron_fleet.platform.processes import ChildKilled
from megatron_fleet.rollout.requests import EnvironmentFailed, EpisodeSpec, RolloutFailed

MAX_RESTARTS = 3
"""Most restarts of one component within `cluster.restarts.MEMORY_S`."""
CALL_TIMEOUT_S = 30.0
"""Timeout of a control call that does little work."""
PROBE_TIMEOUT_S = 5.0
"""Timeout of a probe of an environment server."""
WATCH_INTERVAL_S = 0.25


class ComponentLost(Exception):
    """The process died during a call."""


class Component(ABC):
    """One component and its restarts."""

    def __init__(self, name: str, log: str) -> None:
        self.name, self.log = name, log
        self.restarts = Restarts(name, f"Its log is {log}.", MAX_RESTARTS)

    async def pause(self, reason: str) -> None:
        """Wait before the next restart. Raises RolloutFailed when there were too many."""
        try:
            await self.restarts.pause(reason)
        except OutOfRestarts as error:
            raise RolloutFailed(str(error)) from error

    @abstractmethod
    async def close(self) -> None:
        """Stop the component permanently."""

    def not_started(self, error: BaseException) -> RolloutFailed:
        return RolloutFailed(f"{self.name} did not start: {brief(error)}. Its log is {self.log}.")


class WatchedComponent(Component):
    """Component with a task ``_watching`` that replaces its process when it dies, until it is given up."""

    def __init__(self, name: str, log: str) -> None:
        super().__init__(name, log)
        self._serving = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """Whether the component serves, as far as is known without a check."""
        return self._serving.is_set()

    async def serving(self) -> None:
        """Wait until the component serves. Raises RolloutFailed when it was given up."""
        if self._watching is None:
            raise RuntimeError(f"{self.name} was not started")
        if not self._serving.is_set():
            waiting = asyncio.create_task(self._serving.wait())
            await asyncio.wait((waiting, self._watching), return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
            waiting.cancel()
        if self._watching.done():
            self._watching.result()

    def _begin_to_serve(self, watch: Awaitable[None]) -> None:
        self._serving.set()
        self._watching = asyncio.ensure_future(watch)


class WorkerSlot(Component):
    """Slot of one EpisodeWorker."""

    def __init__(
        self,
        name: str,
        log: str,
        make: Callable[[], Any],
        start_timeout_s: float,
        episode_timeout_s: float,
        slept_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            make: creates the actor.
            slept_s: returns the seconds that engines have slept so far, by which an episode may take longer.
        """
        super().__init__(name, log)
        self._make, self._slept_s = make, slept_s
        self._start_timeout_s = start_timeout_s
        self._episode_timeout_s = episode_timeout_s
        self._actor: Any = None
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        """Create the worker. Raises RolloutFailed when it fails to start, or is killed too often during startup."""
        try:
            await self._create()
        except (RayError, TimeoutError) as error:
            if not died(error):
                raise self.not_started(error) from error
            await self._replace(self._actor, brief(error))

    async def play(self, spec: EpisodeSpec) -> Trajectory:
        """Play an episode.

        Raises:
            ComponentLost: the worker died or hung; it has been replaced.
            RolloutFailed: it was given up.
        """
        actor = self._actor
        try:
            return await self._in_time(actor.play.remote(spec))
        except RayTaskError:
            raise
        except (RayError, TimeoutError) as error:  # the worker's host may be lost, too
            await self._replace(actor, brief(error))
            raise ComponentLost(brief(error)) from error

    async def abort(self, collection: int) -> None:
        """Stop the episodes of a collection. A worker that does not answer is replaced when its episodes are due."""
        await self._tell(self._actor.abort.remote(collection))

    async def forget_failures(self) -> None:
        """See `EpisodeWorker.forget_failures`. A lost worker has no failures to forget."""
        if self._actor is not None:
            await self._tell(self._actor.forget_failures.remote())

    async def engine_moved(self, before: str, now: str) -> None:
        """See `EnginePool.moved`. The replacement of a lost worker reads the current endpoints when it is created."""
        if self._actor is not None:
            await self._tell(self._actor.engine_moved.remote(before, now))

    async def engine_leaves(self, address: str) -> None:
        """See `EnginePool.leaves`."""
        if self._actor is not None:
            await self._tell(self._actor.engine_leaves.remote(address))

    async def policy_dead(self) -> str | None:
        """Return `Policy.dead`; ``None`` also when the worker is lost."""
        with contextlib.suppress(RayError, TimeoutError):
            reason: str | None = await within(self._actor.policy_dead.remote(), CALL_TIMEOUT_S)
            return reason
        return None

    async def close(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)

    async def _in_time(self, played: Any) -> Trajectory:
        """Await an episode; time in which engines sleep does not count. Raises TimeoutError."""
        limit, slept = self._episode_timeout_s, self._slept_s()
        while True:
            try:
                trajectory: Trajectory = await within(played, limit)
                return trajectory
            except TimeoutError:
                limit, slept = self._slept_s() - slept, self._slept_s()
                if limit <= 0:
                    raise

    async def _tell(self, call: Awaitable[None]) -> None:
        """Await a call that may time out here: the worker still receives it later, unless it is lost."""
        with contextlib.suppress(RayError, TimeoutError):
            await within(call, CALL_TIMEOUT_S)

    async def _create(self) -> None:
        self._actor = self._make()
        await within(self._actor.__ray_ready__.remote(), self._start_timeout_s)

    async def _replace(self, lost: Any, reason: str) -> None:
        async with self._replacing:
            while self._actor is lost:  # otherwise another episode has already replaced it
                await self.pause(reason)
                ray.kill(lost)
                try:
                    await self._create()
                    self.restarts.done()
                except (RayError, TimeoutError) as error:
                    lost, reason = self._actor, brief(error)


class EnvironmentSlot(WatchedComponent):
    """Slot of the environments of a run; the run's own server is watched and restarted at the same address."""

    def __init__(self, start: ServerStart, on_return: Callable[[], Awaitable[None]] | None = None) -> None:
        """Args: ``on_return``: awaited when a server is back, before it is used."""
        super().__init__("the environment server", str(start.log))
        limit_s = start.env.outage_limit_s
        advice = f"Its log is {self.log}; fix the environment, then run the same command again to resume."
        where = f"It was restarted for another {limit_s:g} s (env.outage_limit_s). {advice}"
        self.restarts = Restarts(self.name, where, MAX_RESTARTS, limit_s)
        self._start, self._on_return = start, on_return
        self._server: Server | None = None
        self._reason = ""
        self.losses = 0

    async def start(self) -> str:
        """Start the server of the environments, if the run owns one; returns their address.

        Raises:
            UserError: they cannot be started.
            EnvironmentFailed: the server was killed too often during startup.
        """
        while self._server is None:
            try:
                self._server = await asyncio.to_thread(serve, self._start)
            except ServerKilled as error:
                await self.pause(str(error))
        self._begin_to_serve(self._watch(self._server))
        return self._server.url

    async def pause(self, reason: str) -> None:
        """Wait before the next restart. Raises EnvironmentFailed after too many of them, and ``env.outage_limit_s``."""
        try:
            await self.restarts.pause(reason)
        except OutOfRestarts as error:
            raise EnvironmentFailed(str(error)) from error

    def check(self) -> int:
        """Check immediately, not at the watcher's next poll, that the server is alive; returns its number of losses."""
        if self._server is not None and self._serving.is_set() and (reason := self._server.ended()) is not None:
            self._serving.clear()
            self._reason = reason
            self.losses += 1
        return self.losses

    async def available(self) -> str | None:
        """Return why no environment is available now; ``None`` when a server answers, or there is none to probe.

        Raises:
            EnvironmentFailed: the server was given up.
        """
        if self._watching is not None and self._watching.done():
            self._watching.result()
        self.check()
        if not self._serving.is_set():
            return f"{self.name} is being restarted: {self._reason}"
        if self._server is None or not self._server.url:
            return None
        url = self._server.url
        try:
            return await within(asyncio.to_thread(no_answer, url, PROBE_TIMEOUT_S), 2 * PROBE_TIMEOUT_S)
        except TimeoutError:
            return f"{url} gives no answer within {2 * PROBE_TIMEOUT_S:g} s"

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)

    async def _watch(self, server: Server) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.check()
            if not self._serving.is_set():
                await self._replace(server)
                self.restarts.done()
                self._serving.set()

    async def _replace(self, server: Server) -> None:
        while True:
            await self.pause(self._reason)
            try:
                await asyncio.to_thread(server.restart)
            except UserError as error:
                self._reason = str(error)
                continue
            if self._on_return is not None:
                await self._on_return()
            return


async def within(awaitable: Awaitable[Any], timeout_s: float) -> Any:
    """Await with a deadline. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        try:
            return await awaitable
        except GetTimeoutError as error:
            raise TimeoutError(str(error)) from error


def died(error: BaseException) -> bool:
    """Return whether an actor's process, or one that it needs, was killed during a call, as opposed to raising."""
    if isinstance(error, ChildKilled):
        return True
    return isinstance(error, RayActorError) and "creation task" not in str(error)


def brief(error: BaseException) -> str:
    """Summarize in one line an error that may carry a remote traceback or long advice."""
    if died(error):
        return "its process died"
    if isinstance(error, ComponentLost):
        return str(error)
    if isinstance(error, TimeoutError):
        return str(error) or "no answer in time"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
