"""Environment start-up ahead of the episodes, with a concurrency limiter, retries and a circuit breaker."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from megatron_fleet.config.sections.env import ProvisioningConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, Environment, EnvLost, Observation, Reward, ToolCall, cut_reason
from megatron_fleet.envs.breaker import Breaker
from megatron_fleet.envs.limiter import Limiter, Result

PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Upper bound of the pause after the first busy answer, doubled with each further one, and its maximum. The pause is
uniform below it ("full jitter": Brooker 2015, Exponential Backoff And Jitter, AWS Architecture Blog)."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class Quarantined(Exception):
    """The environment's circuit breaker is open: none of its episodes is played now."""


class Gate:
    """FIFO queue of the starts of one environment, which wait for its concurrency limiter."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def through(self, start: Callable[[], Awaitable[T]]) -> T:
        """Await ``start`` once it may run, and report its result to the limiter. Raises what ``start`` raises."""
        await self._enter()
        began = time.monotonic()
        result: Result = "dropped"
        try:
            value = await start()
            result = "started"
            return value
        except (EnvBusy, EnvLost):
            result = "refused"
            raise
        finally:
            self._leave(began, result)

    async def _enter(self) -> None:
        if self.limiter.begin():  # never while others wait, see _leave
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled():  # admitted at the same moment
                self._leave(time.monotonic(), "dropped")
            raise

    def _leave(self, began: float, result: Result) -> None:
        self.limiter.end(began, time.monotonic(), result)
        while self._waiting:
            if not self._waiting[0].cancelled():
                if not self.limiter.begin():
                    return
                self._waiting[0].set_result(None)
            self._waiting.popleft()


class ProvisionedEnvironment:
    """An Environment that is started before its episode begins and whose every failure is EnvLost.

    ``start`` performs the real reset and keeps its result for ``reset``. Waiting for an instance therefore uses up
    neither an episode's time nor a slot among the episodes in progress. Any other exception of an adapter, caused by an
    invalid reply of a server, is a lost session too.

    Attributes:
        metrics: ``provision_s``: seconds from the request until started or given up; ``start_retries``.
    """

    def __init__(self, inner: Environment, gate: Gate, wait_s: float) -> None:
        self.metrics: dict[str, float] = {"provision_s": 0.0, "start_retries": 0.0}
        self._inner = inner
        self._gate = gate
        self._wait_s = wait_s
        self._first: Observation | None = None
        self._lost: str | None = None
        self._closed = False

    async def start(self, task: Task) -> None:
        """Reset, with retries while the server is busy, within the time budget. Raises only CancelledError."""
        began = time.monotonic()
        busy = ""
        try:
            async with asyncio.timeout(self._wait_s):
                while self._first is None:
                    try:
                        self._first = await self._gate.through(lambda: self._guarded(lambda: self._inner.reset(task)))
                    except EnvBusy as error:
                        busy = f"; last answer: {error}"
                        await self._pause()
        except TimeoutError:
            self._lost = f"no environment within {self._wait_s:g} s (env.provisioning.wait_s){busy}"
        except EnvLost as error:
            self._lost = str(error)
        self.metrics["provision_s"] = time.monotonic() - began

    async def reset(self, task: Task) -> Observation:
        """Return the observation from ``start``. Raises EnvLost when it failed."""
        if self._first is None:
            raise EnvLost(self._lost or "the environment was not started")
        return self._first

    async def step(self, call: ToolCall) -> Observation:
        """See ``Environment.step``."""
        return await self._guarded(lambda: self._inner.step(call))

    async def verify(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Reward:
        """See ``Environment.verify``."""
        try:
            return await self._guarded(lambda: self._inner.verify(final_answer, conversation))
        except (EnvBusy, EnvLost) as error:
            return Reward(None, f"session lost before the verdict: {error}")

    async def close(self) -> None:
        """See ``Environment.close``."""
        if not self._closed:
            self._closed = True
            await self._inner.close()

    async def _pause(self) -> None:
        bound = min(PAUSE_S * 2 ** self.metrics["start_retries"], MAX_PAUSE_S)
        self.metrics["start_retries"] += 1
        await asyncio.sleep(random.uniform(0, bound))

    async def _guarded(self, request: Callable[[], Awaitable[T]]) -> T:
        if self._lost is not None:
            raise EnvLost(self._lost)
        try:
            return await request()
        except (EnvBusy, EnvLost):
            raise
        except Exception as error:
            self._lost = cut_reason(f"{type(error).__name__}: {error}")
            log.warning("an environment's answer could not be used: %s", self._lost)
            log.debug("it failed here", exc_info=True)
            raise EnvLost(self._lost) from error


class Provisioner:
    """Concurrency limiters and circuit breakers of one worker, by environment key."""

    def __init__(self, config: ProvisioningConfig) -> None:
        """``config``: the worker's share of the limits."""
        self._config = config
        self._gates: dict[str, Gate] = {}
        self._breakers: dict[str, Breaker] = {}

    def admit(self, env_key: str) -> int:
        """Admit one episode; return its ticket for ``ended``. Raises Quarantined."""
        now = time.monotonic()
        breaker = self._breaker(env_key)
        ticket = breaker.admit(now)
        if ticket is None:
            raise Quarantined(
                f"environment {env_key} is in quarantine because too many of its episodes failed; the next is tried in "
                f"{breaker.seconds_left(now):.0f} s"
            )
        return ticket

    def environment(self, env_key: str, inner: Environment) -> ProvisionedEnvironment:
        """Wrap ``inner`` so that it starts when the limiter of ``env_key`` allows it."""
        config = self._config
        if env_key not in self._gates:
            limiter = Limiter(config.starts_at_once, config.max_starts_at_once, config.quick_s)
            self._gates[env_key] = Gate(limiter)
        return ProvisionedEnvironment(inner, self._gates[env_key], config.wait_s)

    def ended(self, env_key: str, ticket: int, failed: bool | None, reason: str) -> None:
        """Record the end of an admitted episode.

        Args:
            failed: ``None`` if it says nothing about its environment.
            reason: why its reward is unknown, if so.
        """
        now = time.monotonic()
        breaker = self._breaker(env_key)
        before = breaker.open, breaker.seconds_left(now)
        breaker.ended(ticket, now, failed)
        if before[0] and not breaker.open:
            log.warning("environment %s is well again", env_key)
        elif breaker.seconds_left(now) > before[1]:
            pause_s = breaker.seconds_left(now)
            log.warning("environment %s goes into quarantine for %.0f s; last failure: %s", env_key, pause_s, reason)

    def gauges(self, env_key: str) -> dict[str, float]:
        """Return the current state of one environment as numbers."""
        gate = self._gates.get(env_key)
        limit = self._config.starts_at_once if gate is None else gate.limiter.limit
        return {"breaker_open": float(self._breaker(env_key).open), "start_limit": float(limit)}

    def _breaker(self, env_key: str) -> Breaker:
        if env_key not in self._breakers:
            config = self._config
            self._breakers[env_key] = Breaker(config.breaker_window, config.breaker_threshold, config.breaker_pause_s)
        return self._breakers[env_key]
