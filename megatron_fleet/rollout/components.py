"""The processes under the manager: started, watched, replaced when they die.

Each slot owns one place (engine 0, worker 1, ...). What sits in it may change; who uses the slot need not care.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.rollout.requests import EpisodeSpec, RolloutFailed, Weights

MAX_RESTARTS = 3
"""Of one place within ``MEMORY_S``; a component that dies more often has a cause that restarting does not mend."""
MEMORY_S = 3600.0
BACKOFF_S = 1.0
"""Pause before the first restart; it doubles each time."""
CALL_TIMEOUT_S = 30.0
"""Of a control call that does no work worth mentioning."""
CLOSE_TIMEOUT_S = 5.0


class ComponentLost(Exception):
    """The process died under a call. Its place is filled again by the time this is raised."""


class Restarts:
    """How often a place was filled again, and the patience left."""

    def __init__(self, name: str, log: str):
        self._name, self._log = name, log
        self._recent: list[float] = []
        self.count = 0

    async def pause(self, reason: str) -> None:
        """Wait before the next restart. Raises RolloutFailed when there were too many."""
        print(f"{time.strftime('%F %T')} {self._name} is lost: {reason}", flush=True)
        now = time.monotonic()
        self._recent = [then for then in self._recent if now - then < MEMORY_S]
        if len(self._recent) >= MAX_RESTARTS:
            times = len(self._recent) + 1
            raise RolloutFailed(f"{self._name} died {times} times, last: {reason}. Its log is {self._log}.")
        await asyncio.sleep(BACKOFF_S * 2 ** len(self._recent))
        self._recent.append(now)
        self.count += 1

    def done(self) -> None:
        print(f"{time.strftime('%F %T')} {self._name} is back", flush=True)


class EngineSlot:
    """One engine replica: ``make`` creates its actor. After ``start`` the slot replaces a dead one by itself, on the
    same address. The new one answers nothing before it has the weights last settled.

    Between ``sleep`` and ``wake("kv_cache")`` the device is the trainer's: an engine that dies then is replaced when
    the trainer has left, and takes the weights that were settled meanwhile.
    """

    def __init__(self, name: str, log: str, make: Callable[[], Any], start_timeout_s: float):
        self.restarts = Restarts(name, log)
        self.endpoint = ""
        self._name, self._log = name, log
        self._make = make
        self._start_timeout_s = start_timeout_s
        self._actor: Any = None
        self._updating: Any = None
        self._weights: Weights | None = None
        self._version: int | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        self._serving = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._asleep: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._reason = ""

    async def listen(self) -> None:
        """Create the actor and learn its endpoint."""
        port = int(self.endpoint.rsplit(":", 1)[1]) if self.endpoint else 0
        self._actor = self._make()
        self.endpoint = await _within(self._actor.listen.remote(port), self._start_timeout_s)

    async def start(self) -> None:
        """Load the model. Raises RolloutFailed when it cannot."""
        try:
            await _within(self._actor.start.remote(), self._start_timeout_s)
            await _within(self._actor.serve.remote(), CALL_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            raise RolloutFailed(f"{self._name} did not start: {_brief(error)}. Its log is {self._log}.") from error
        self._serving.set()
        self._watching = asyncio.create_task(self._watch())

    async def serving(self) -> None:
        """Wait until the engine serves. Raises RolloutFailed when it was given up."""
        assert self._watching is not None  # since `start`
        if not self._serving.is_set():
            waiting = asyncio.create_task(self._serving.wait())
            await asyncio.wait((waiting, self._watching), return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
            waiting.cancel()
        if self._watching.done():
            self._watching.result()

    async def check(self) -> None:
        """Learn now, not at the next look of the watcher, whether the engine still serves."""
        actor = self._actor
        if self._serving.is_set():
            try:
                if not await _within(actor.usable.remote(), CALL_TIMEOUT_S):
                    self._serving.clear()
            except (RayActorError, TimeoutError) as error:
                self._lose(actor, error)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call the actor; when the engine is lost under the call, call the next one. For calls that bear repeating.

        Raises:
            RolloutFailed: the engine was given up.
            RayTaskError: the call itself is wrong; the engine is well.
        """
        while True:
            await self.serving()
            actor = self._actor
            try:
                return await _within(getattr(actor, method).remote(*args), timeout_s)
            except (RayActorError, TimeoutError) as error:
                self._lose(actor, error)
            except RayTaskError:
                await self.check()
                if self._serving.is_set():
                    raise

    async def update(self, method: str, *args: Any, timeout_s: float) -> None:
        """One verb of a weight update. An engine that fails one is lost, and takes no part until ``settle``."""
        if method == "start_update":
            self._settled.clear()
            self._updating = self._actor if self._serving.is_set() else None
        actor = self._actor
        if method != "init_weight_transfer" and self._updating is not actor:
            return
        try:
            await _within(getattr(actor, method).remote(*args), timeout_s)
            if method == "finish_update":
                (self._version,) = args
        except (RayError, TimeoutError) as error:
            self._lose(actor, error)

    async def settle(self, weights: Weights) -> None:
        """From now on these are the weights of the slot; returns when the engine has them, or is to take them when it
        comes back."""
        self._weights = weights
        self._settled.set()
        while await self._there() and self._version != weights.version:
            actor = self._actor
            try:
                await self._catch_up()
            except (RayError, TimeoutError) as error:
                self._lose(actor, error)

    async def _there(self) -> bool:
        """Wait for the engine, unless it cannot come because the trainer has its device."""
        if not self._room.is_set():
            return self._serving.is_set()
        await self.serving()
        return True

    async def sleep(self, timeout_s: float) -> str | None:
        """Make the engine leave its device, see ``EngineActor.sleep``. One that is being replaced is waited for."""
        await self.serving()
        self._room.clear()
        self._asleep = self._actor
        return await self._change(self._actor, "sleep", timeout_s=timeout_s)

    async def wake(self, part: Literal["weights", "kv_cache"], timeout_s: float) -> None:
        """Let the engine take memory; with the KV cache it has its device, and this returns when it serves."""
        if self._asleep is self._actor and self._serving.is_set():
            await self._change(self._actor, "wake", part, timeout_s=timeout_s)
        if part == "kv_cache":
            self._room.set()
            await self.serving()

    async def _change(self, actor: Any, method: str, *args: Any, timeout_s: float) -> Any:
        """Call an engine that is lost when the call fails."""
        try:
            return await _within(getattr(actor, method).remote(*args), timeout_s)
        except (RayError, TimeoutError) as error:
            self._lose(actor, error)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._actor is not None:
            with contextlib.suppress(RayError, TimeoutError):
                await _within(self._actor.shutdown.remote(), CLOSE_TIMEOUT_S)
            ray.kill(self._actor)

    def _lose(self, actor: Any, error: BaseException) -> None:
        """A call failed. It may have taken so long that another engine is in the place already, which lives."""
        if actor is not self._actor:
            return
        self._serving.clear()
        self._reason = _brief(error)
        ray.kill(self._actor)

    async def _watch(self) -> None:
        """Wait for the engine's end and fill its place, until that is hopeless."""
        while True:
            try:
                reason = await self._actor.watch.remote()
            except RayError as error:
                reason = self._reason or _brief(error)
            self._serving.clear()
            await self._replace(reason)
            self.restarts.done()
            self._reason = ""
            self._serving.set()

    async def _replace(self, reason: str) -> None:
        while True:
            await self.restarts.pause(reason)
            ray.kill(self._actor)
            await self._room.wait()
            try:
                await self.listen()
                await _within(self._actor.start.remote(), self._start_timeout_s)
                self._version = None
                await self._take_settled()
                await _within(self._actor.serve.remote(), CALL_TIMEOUT_S)
                return
            except (RayError, TimeoutError) as error:
                reason = _brief(error)

    async def _take_settled(self) -> None:
        """An engine comes up with the weights of the start; give it the newest. An update under way goes first: what
        the older ones are taken from is being overwritten."""
        while True:
            await self._settled.wait()
            if self._weights is None or self._weights.version == self._version:
                return
            await self._catch_up()

    async def _catch_up(self) -> None:
        weights = self._weights
        assert weights is not None  # both callers have looked
        if not weights.lasting:
            raise RolloutFailed(
                f"{self._name} was lost and version {weights.version} of the weights cannot be sent a second time; go "
                f"on from the newest checkpoint. Its log is {self._log}."
            )
        actor = self._actor
        steps = [(actor.init_weight_transfer, weights.init_info), (actor.start_update,)]
        steps += [(actor.update_weights, chunk) for chunk in weights.chunks]
        for method, *args in [*steps, (actor.finish_update, weights.version)]:
            await _within(method.remote(*args), self._start_timeout_s)
        self._version = weights.version


class WorkerSlot:
    """One EpisodeWorker."""

    def __init__(self, name: str, log: str, make: Callable[[], Any], start_timeout_s: float, run_timeout_s: float):
        self.restarts = Restarts(name, log)
        self._name, self._log = name, log
        self._make = make
        self._start_timeout_s = start_timeout_s
        self._run_timeout_s = run_timeout_s
        self._actor: Any = None
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        """Create the worker. Raises RolloutFailed when it cannot be."""
        try:
            await self._create()
        except (RayError, TimeoutError) as error:
            raise RolloutFailed(f"{self._name} did not start: {_brief(error)}. Its log is {self._log}.") from error

    async def _create(self) -> None:
        self._actor = self._make()
        await _within(self._actor.__ray_ready__.remote(), self._start_timeout_s)

    async def run(self, specs: Sequence[EpisodeSpec]) -> list[Trajectory]:
        """Play a batch. Raises ComponentLost when the worker died or hung; a new one is then in its place."""
        actor = self._actor
        try:
            return await _within(actor.run.remote(list(specs)), self._run_timeout_s)
        except (RayActorError, TimeoutError) as error:
            await self._replace(actor, _brief(error))
            raise ComponentLost(_brief(error)) from error

    async def abort(self) -> None:
        """Stop the episodes of every batch. A worker that does not answer is replaced when its batch is due."""
        with contextlib.suppress(RayError, TimeoutError):
            await _within(self._actor.abort.remote(), CALL_TIMEOUT_S)

    async def close(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)

    async def _replace(self, lost: Any, reason: str) -> None:
        async with self._replacing:
            while self._actor is lost:  # else another of its batches has seen to it
                await self.restarts.pause(reason)
                ray.kill(lost)
                try:
                    await self._create()
                    self.restarts.done()
                except (RayActorError, TimeoutError) as error:
                    lost, reason = self._actor, _brief(error)


async def _within(awaitable: Awaitable[Any], timeout_s: float) -> Any:
    """Await with a deadline. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        try:
            return await awaitable
        except GetTimeoutError as error:
            raise TimeoutError(str(error)) from error


def _brief(error: BaseException) -> str:
    """One line of an error that may carry a remote traceback or a page of advice."""
    if isinstance(error, RayActorError) and "creation task" not in str(error):
        return "its process died"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1].strip()}" if lines else type(error).__name__
