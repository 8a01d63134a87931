"""Slots of engines, which are watched, replaced when they die, and receive weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.rollout.components import CALL_TIMEOUT_S, ComponentLost, WatchedComponent, brief, died, within
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.rollout.requests import RolloutFailed
from megatron_fleet.weight_sync.base import SingleReceiver, WeightReceiver

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0

OnMove = Callable[[str, str], Awaitable[None]]
"""Called with the endpoint of a lost engine and the endpoint of its replacement."""
Resend = Callable[[SingleReceiver, int], Awaitable[None]]
"""Resends a weight version to one engine. It may wait for the trainer as long as necessary: it is cancelled if, before
that engine's own update has begun, an update of all engines begins, after which the engine requests it again, or the
engine is put to sleep, after which it takes part in the next update."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weight version that was sent to all engines; ``message``: see `WeightReceiver.finish_update`."""

    version: int
    message: Mapping[str, Any] | None


class EngineSlot(WatchedComponent):
    """Slot of one engine replica. After `start` it replaces a dead engine by itself. The replacement has a new address,
    since the old one may be in use by then, and answers no request before it has the weights of the last update.

    A slot that is added to a run joins with `join` instead of `start`: updates of the other engines do not wait for it
    before it serves.

    Between `sleep` and ``wake("kv_cache")`` the trainer owns the device: an engine that dies then is replaced once the
    trainer is offloaded, and receives the weights of the last update. Every `sleep` is followed by an update before
    ``wake("kv_cache")``, because weights are lost in sleep; so an engine may go to sleep without its weights.

    Attributes:
        gone: the engine has left: nobody waits for it any more, and calls have no effect.
    """

    def __init__(
        self,
        name: str,
        log: str,
        make: Callable[[], Awaitable[Any]],
        *,
        host: str,
        start_timeout_s: float,
        update_timeout_s: float,
        on_move: OnMove,
        resend: Callable[[], Resend | None],
        joining: bool = False,
    ) -> None:
        """
        Args:
            make: creates the actor; raises ComponentLost when its host does not return.
            host: address to listen on.
            resend: returns the current `Resend`, if any.
            joining: it will `join`.
        """
        super().__init__(name, log)
        self.endpoint = ""
        self._make, self.host = make, host
        self._start_timeout_s, self._update_timeout_s = start_timeout_s, update_timeout_s
        self._on_move, self._find_resend = on_move, resend
        self._actor: Any = None
        self._updating: Any = None
        self._init_info: Mapping[str, Any] = {}
        self._weights: Weights | None = None
        self._loaded: Weights | None = None
        self._settled = asyncio.Event()
        self._settled.set()
        self._resending: tuple[asyncio.Future[None], _StartedEngine] | None = None
        self._device_free = asyncio.Event()
        self._device_free.set()
        self._waits_for_device = asyncio.Event()
        self._asleep: Any = None
        self._counted = EngineStatistics()
        self._reason = ""
        self._joining = joining
        self.gone = False

    async def serving(self) -> None:
        """Wait until the engine serves, or is gone. Raises RolloutFailed when it was given up."""
        if self.gone:
            return
        try:
            await super().serving()
        except asyncio.CancelledError:  # of its watcher, by `leave`, or of the caller
            caller = asyncio.current_task()
            if not self.gone or (caller is not None and caller.cancelling()):
                raise

    @property
    def takes_weights(self) -> bool:
        """Whether an update reaches the engine at once: it serves, or was replaced and waits for the weights that it
        had, which the update takes the place of. Raises RolloutFailed when it was given up.
        """
        if self._watching is not None and self._watching.done():
            self._watching.result()
        return self._serving.is_set() or self._resending is not None

    async def listen(self) -> None:
        """Create the actor and get its endpoint. Raises RolloutFailed when that fails, or it is killed too often."""
        while True:
            try:
                return await self._listen()
            except (RayError, TimeoutError, ComponentLost) as error:
                if not died(error):
                    raise self.not_started(error) from error
                await self.pause(brief(error))

    async def start(self) -> None:
        """Load the model. Raises RolloutFailed when that fails, or the engine is killed too often meanwhile."""
        try:
            await self._start()
            await within(self._actor.serve.remote(), CALL_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            if not died(error):
                raise self.not_started(error) from error
            await self._replace(brief(error))
        self._begin_to_serve(self._watch())

    async def join(self, latest: Weights | None, init_info: Mapping[str, Any], settled: bool) -> None:
        """Start the engine while others serve already. It has their weights when this returns, and serves.

        Args:
            latest: weights of the others, see `EngineGroup`.
            init_info: of their transport.
            settled: no update of theirs is running.

        Raises:
            RolloutFailed: it cannot start.
        """
        self._weights, self._init_info = latest, init_info
        if not settled:
            self._settled.clear()
        while True:
            try:
                await self._bring_up()
                break
            except (RayError, TimeoutError, ComponentLost) as error:
                await self.pause(brief(error))
                if self._actor is not None:
                    ray.kill(self._actor)
        self._joining = False
        self._begin_to_serve(self._watch())

    async def interrupt(self) -> None:
        """See `Sampler.interrupt`."""
        if self._serving.is_set():
            with contextlib.suppress(RayError, TimeoutError):
                await within(self._actor.interrupt.remote(), CALL_TIMEOUT_S)

    def leave(self) -> None:
        """Give the engine up, because its host leaves or is lost; calls that wait for it return."""
        self.gone = True
        self._serving.clear()
        self._updating = None
        self._settled.set()
        if self._watching is not None:
            self._watching.cancel()
        if self._actor is not None:
            ray.kill(self._actor)

    async def check(self) -> None:
        """Check immediately, not at the watcher's next poll, that the engine still serves."""
        actor = self._actor
        if self._serving.is_set():
            try:
                if not await within(actor.usable.remote(), CALL_TIMEOUT_S):
                    self._serving.clear()
            except (RayActorError, TimeoutError) as error:
                self._lose(actor, error)

    async def score(self, sequences: Sequence[np.ndarray], timeout_s: float) -> list[np.ndarray]:
        return await self._repeat(lambda actor: actor.score.remote(list(sequences)), timeout_s)

    async def sample(self) -> EngineStatistics:
        """Return what the engine counted since the last sample; nothing of an engine that is lost."""
        counts = EngineStatistics()
        if self._serving.is_set():
            with contextlib.suppress(RayError, TimeoutError):
                counts = await within(self._actor.read_statistics.remote(), CALL_TIMEOUT_S)
        self._counted = self._counted + counts
        return counts

    async def statistics(self) -> EngineStatistics:
        """Return what the engine counted since the last call."""
        await self.sample()
        counts, self._counted = self._counted, EngineStatistics()
        return counts

    async def sampled_tokens(self) -> int:
        return await self._repeat(lambda actor: actor.sampled_tokens.remote(), CALL_TIMEOUT_S)

    async def processes(self) -> list[int]:
        return await self._repeat(lambda actor: actor.processes.remote(), CALL_TIMEOUT_S)

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        """See `WeightReceiver`. The data of a previous transport cannot be sent again, so an engine that is being
        replaced waits for the next update."""
        self._init_info = init_info
        self._settled.clear()
        self._stop_resending()
        if self._serving.is_set():
            actor = self._actor
            await self._or_lose(actor, actor.open_transport.remote(init_info))

    async def begin_update(self) -> None:
        self._settled.clear()
        self._stop_resending()
        self._updating = self._actor if self._serving.is_set() else None
        if self._updating is not None:
            await self._or_lose(self._updating, self._updating.begin_update.remote())

    async def load(self, message: Mapping[str, Any]) -> None:
        if self._takes_part():
            await self._or_lose(self._updating, self._updating.load.remote(message))

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        """See `WeightReceiver`. An engine that died while the trainer owns its device gets the version when replaced.

        Raises:
            RolloutFailed: the engine was given up.
        """
        weights = Weights(version, message)
        if self._takes_part() and await self._or_lose(self._updating, self._updating.finish_update.remote(version)):
            self._loaded = weights
        self._weights = weights
        self._settled.set()
        if self._joining:
            return
        while await self._there() and self._loaded is not weights:
            actor = self._actor
            try:
                await self._catch_up()
            except (RayError, TimeoutError, ComponentLost) as error:
                self._lose(actor, error)

    async def sleep(self) -> str | None:
        """Put the engine to sleep, see `EngineActor.sleep`.

        Waits for one that is being started, which occupies its device, but never for the trainer: weights that have not
        begun to arrive come with the next update. One that is not started yet stays away until the device is free.
        """
        self._device_free.clear()
        self._stop_resending()
        if not await self._serves_or_waits_for_device():
            return None
        actor = self._asleep = self._actor
        try:
            return await within(actor.sleep.remote(), self._update_timeout_s)
        except (RayError, TimeoutError) as error:
            self._lose(actor, error)
            return None

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Wake ``part`` of the engine; ``kv_cache`` returns its device to it and waits until it serves."""
        if self._asleep is self._actor and self._serving.is_set():
            await self._or_lose(self._actor, self._actor.wake.remote(part))
        if part == "kv_cache":
            self._device_free.set()
            await self.serving()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._actor is not None:
            with contextlib.suppress(RayError, TimeoutError):
                await within(self._actor.shutdown.remote(), CLOSE_TIMEOUT_S)
            ray.kill(self._actor)

    async def _listen(self) -> None:
        self._actor = await self._make()
        before = self.endpoint
        self.endpoint = await within(self._actor.listen.remote(self.host), self._start_timeout_s)
        if before:
            await self._on_move(before, self.endpoint)

    async def _start(self) -> None:
        try:
            await within(self._actor.start.remote(), self._start_timeout_s)
        except TimeoutError as error:
            limit = f"{self._start_timeout_s:g} s (rollout.engine.start_timeout_s)"
            raise TimeoutError(f"not within {limit}; its log shows where its processes were") from error

    async def _repeat(self, call: Callable[[Any], Awaitable[Any]], timeout_s: float) -> Any:
        """Call the actor; if the engine is lost during the call, call its replacement.

        Raises:
            RolloutFailed: the engine was given up.
            ComponentLost: it is gone.
            RayTaskError: the call itself failed; the engine is healthy.
        """
        while True:
            await self.serving()
            if self.gone:
                raise ComponentLost(f"{self.name} has left")
            actor = self._actor
            try:
                return await within(call(actor), timeout_s)
            except (RayActorError, TimeoutError) as error:
                self._lose(actor, error)
            except RayTaskError:
                await self.check()
                if self._serving.is_set():
                    raise

    def _takes_part(self) -> bool:
        return self._updating is not None and self._updating is self._actor

    async def _or_lose(self, actor: Any, call: Awaitable[None]) -> bool:
        """Await a call, and mark the engine as lost if it fails. Returns whether it succeeded."""
        try:
            await within(call, self._update_timeout_s)
            return True
        except (RayError, TimeoutError) as error:
            self._lose(actor, error)
            return False

    def _lose(self, actor: Any, error: BaseException) -> None:
        """Mark ``actor`` as lost after a failed call, unless it has been replaced while the call was running."""
        if actor is not self._actor or self.gone:
            return
        self._serving.clear()
        self._updating = None
        self._reason = brief(error)
        ray.kill(self._actor)

    async def _there(self) -> bool:
        """Wait for the engine, unless it cannot start as the trainer owns its device; returns whether it serves."""
        if not self._device_free.is_set():
            return self._serving.is_set()
        await self.serving()
        return not self.gone

    async def _serves_or_waits_for_device(self) -> bool:
        """Wait until the engine serves or its replacement waits for the device; returns whether it serves.

        Raises:
            RolloutFailed: the engine was given up.
        """
        waiting = asyncio.create_task(self._waits_for_device.wait())
        serving = asyncio.create_task(self.serving())
        try:
            await asyncio.wait((waiting, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return self._serving.is_set()
        finally:
            waiting.cancel()
            serving.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                reason = await self._actor.watch.remote()
            except RayError as error:
                reason = self._reason or brief(error)
            self._serving.clear()
            await self._replace(reason)
            self.restarts.done()
            self._reason = ""
            self._serving.set()

    async def _replace(self, reason: str) -> None:
        while True:
            await self.pause(reason)
            ray.kill(self._actor)
            await self._until_device_is_free()
            try:
                return await self._bring_up()
            except (RayError, TimeoutError, ComponentLost) as error:
                reason = brief(error)

    async def _bring_up(self) -> None:
        """Make an engine with the newest weights that answers requests; between its last check for an update and the
        return nothing else runs."""
        await self._listen()
        await self._start()
        self._loaded = None
        settled = False
        while not settled:
            await self._take_settled()
            await within(self._actor.serve.remote(), CALL_TIMEOUT_S)
            settled = self._settled.is_set() or not self._device_free.is_set()

    async def _until_device_is_free(self) -> None:
        self._waits_for_device.set()
        while not self._device_free.is_set():  # it may be taken again between its release and this task's turn
            await self._device_free.wait()
        self._waits_for_device.clear()

    async def _take_settled(self) -> None:
        """Send the newest weights to a started engine, which has the initial ones.

        Waits for a running update, because it overwrites the source of the older weights. Returns without weights when
        the engine is to sleep: the next update covers it.
        """
        while self._device_free.is_set():
            await self._settled.wait()
            if self._weights is self._loaded:
                return
            await self._catch_up()

    async def _catch_up(self) -> None:
        """Load the weights of the last update, unless another update begins meanwhile."""
        weights = self._weights
        assert weights is not None  # checked by both callers
        receiver = _StartedEngine(self._actor, self._start_timeout_s)
        if weights.message is None:
            await self._ask_again(receiver, weights.version)
        else:
            await receiver.open_transport(self._init_info)
            await receiver.begin_update()
            await receiver.load(weights.message)
            await receiver.finish_update(weights.version, weights.message)
        if receiver.version == weights.version:
            self._loaded = weights

    async def _ask_again(self, receiver: _StartedEngine, version: int) -> None:
        resend = self._find_resend()
        if resend is None:
            raise RolloutFailed(
                f"{self.name} was lost and version {version} of the weights cannot be sent a second time; resume from "
                f"the newest checkpoint. Its log is {self.log}."
            )
        sending = asyncio.ensure_future(resend(receiver, version))
        self._resending = sending, receiver
        try:
            await asyncio.wait({sending})
        finally:
            self._resending = None
            sending.cancel()
        if sending.cancelled():
            return
        error = sending.exception()
        if isinstance(error, RolloutFailed):
            raise error
        if error is not None or receiver.version != version:
            what = "nothing was sent" if error is None else brief(error)
            raise ComponentLost(f"version {version} of the weights was not sent again: {what}") from error

    def _stop_resending(self) -> None:
        """Cancel a resend that has not begun: the next update of all engines supersedes it, and may wait for it."""
        if self._resending is not None and not self._resending[1].begun:
            self._resending[0].cancel()


class _StartedEngine:
    """`SingleReceiver` of an engine that does not serve yet; its failures are raised.

    Attributes:
        version: weight version of the engine; ``None`` before the end of an update.
    """

    def __init__(self, actor: Any, timeout_s: float) -> None:
        self._actor, self._timeout_s = actor, timeout_s
        self.begun = False
        self.version: int | None = None

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        await within(self._actor.open_transport.remote(init_info), self._timeout_s)

    async def begin_update(self) -> None:
        self.begun = True
        await within(self._actor.begin_update.remote(), self._timeout_s)

    async def load(self, message: Mapping[str, Any]) -> None:
        await within(self._actor.load.remote(message), self._timeout_s)

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        await within(self._actor.finish_update.remote(version), self._timeout_s)
        self.version = version


class EngineGroup:
    """Engines of one kind as one WeightReceiver.

    Attributes:
        latest: weights of the last update; ``None`` before the first.
        init_info: of the last transport that was opened.
        settled: no update is running.
    """

    def __init__(self, slots: Iterable[EngineSlot], ready: Callable[[], Awaitable[None]]) -> None:
        """
        Args:
            slots: read at each verb, as engines may be added and leave.
            ready: awaited before each verb.
        """
        self._all, self._ready = slots, ready
        self.latest: Weights | None = None
        self.init_info: Mapping[str, Any] = {}
        self.settled = True

    @property
    def _slots(self) -> list[EngineSlot]:
        return [slot for slot in self._all if not slot.gone]

    def take_weights(self) -> bool:
        """Whether an update reaches all engines at once, see `EngineSlot.takes_weights`."""
        return all(slot.takes_weights for slot in self._slots)

    async def hand_on(self, others: WeightReceiver) -> bool:
        """Let other engines load the weights of this group's last update; returns false where only the trainer has
        them. Others cannot load them a second time: another update may have overwritten them by then.
        """
        weights = self.latest
        if weights is None or weights.message is None:
            return False
        await others.open_transport(self.init_info)
        await others.begin_update()
        await others.load(weights.message)
        await others.finish_update(weights.version, None)
        return True

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        await self._ready()
        self.init_info, self.settled = init_info, False
        await asyncio.gather(*(slot.open_transport(init_info) for slot in self._slots))

    async def begin_update(self) -> None:
        await self._ready()
        self.settled = False
        await asyncio.gather(*(noted(slot, "begin_update", slot.begin_update()) for slot in self._slots))

    async def load(self, message: Mapping[str, Any]) -> None:
        await self._ready()
        await asyncio.gather(*(noted(slot, "load", slot.load(message)) for slot in self._slots))

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        """See `WeightReceiver`. Raises RolloutFailed when an engine was given up."""
        await self._ready()
        self.latest, self.settled = Weights(version, message), True
        finishing = (noted(slot, "finish_update", slot.finish_update(version, message)) for slot in self._slots)
        await asyncio.gather(*finishing)


async def noted(slot: EngineSlot, name: str, work: Awaitable[T]) -> T:
    """Await ``work`` and note it on the timeline as the engine's."""
    began, since = time.time(), time.monotonic()
    try:
        return await work
    finally:
        TIMELINE.add("engines", slot.name, name, began, time.monotonic() - since)
