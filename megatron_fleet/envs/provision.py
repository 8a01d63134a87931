"""Environment start-up ahead of the episodes, with a concurrency limiter, retries and a circuit breaker."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from megatron_fleet.config.sections.env import ProvisioningConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import (
    EnvBusy,
    Environment,
    EnvLost,
    EnvRefused,
    Observation,
    Reward,
    ToolCall,
    cut_reason,
)

PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Upper bound of the pause after the first busy answer, doubled with each further one, and its maximum. The pause is
uniform below it ("full jitter": Brooker 2015, Exponential Backoff And Jitter, AWS Architecture Blog)."""

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_PAUSE = 32
"""Longest pause, in units of the first."""
ALPHA, BETA = 3.0, 6.0
"""Estimated starts queued at the server: the limit grows below the first, shrinks above the second."""
CUT = 0.5
"""Factor by which a refused start reduces the limit."""

Result = Literal["started", "refused", "dropped"]
"""``refused``: no capacity, an error or a missed deadline. ``dropped``: cancelled by us, so without information."""


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
        self._refused: EnvRefused | None = None
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
        except EnvRefused as error:
            self._refused = error
        except EnvLost as error:
            self._lost = str(error)
        self.metrics["provision_s"] = time.monotonic() - began

    async def reset(self, task: Task) -> Observation:
        """Return the observation from ``start``. Raises EnvLost or EnvRefused when it failed."""
        if self._refused is not None:
            raise self._refused
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
            log.warning("environment %s has recovered", env_key)
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


class Breaker:
    """Circuit breaker over the newest ``window`` episodes of one environment (Nygard 2007, Release It!, §5.2).

    *Closed*: every episode is admitted. When ``window`` episodes are known and at least a share ``threshold`` of them
    failed, it opens. *Open*: none is admitted for ``pause_s``. *Half-open*: one is admitted as a probe. If it fails,
    the breaker opens again, for twice as long; if not, it closes and clears its history.

    An episode other than the probe that ends while the breaker is not closed was admitted earlier and is ignored.
    """

    def __init__(self, window: int, threshold: float, pause_s: float) -> None:
        self._failures: deque[bool] = deque(maxlen=window)
        self._threshold = threshold
        self._pause_s = pause_s
        self._pauses = 1
        self._open_until: float | None = None
        self._probe: int | None = None
        self._admitted = 0

    @property
    def open(self) -> bool:
        """Whether the breaker is open or half-open."""
        return self._open_until is not None

    def admit(self, now: float) -> int | None:
        """Admit one episode; return its ticket for ``ended``, or ``None`` while episodes are refused."""
        if self._open_until is not None:
            if now < self._open_until or self._probe is not None:
                return None
            self._probe = self._admitted
        self._admitted += 1
        return self._admitted - 1

    def ended(self, ticket: int, now: float, failed: bool | None) -> None:
        """Record the end of an admitted episode.

        ``failed`` is ``None`` if it says nothing about the environment, e.g. because the engine died.
        """
        if self._open_until is not None:
            if ticket == self._probe:
                self._probed(now, failed)
        elif failed is not None:
            self._failures.append(failed)
            full = len(self._failures) == self._failures.maxlen
            if full and sum(self._failures) >= self._threshold * len(self._failures):
                self._open(now)

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next probe; 0 when it may begin or is running, or the breaker is closed."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - now)

    def _probed(self, now: float, failed: bool | None) -> None:
        self._probe = None
        if failed:
            self._pauses = min(2 * self._pauses, MAX_PAUSE)
            self._open(now)
        elif failed is not None:
            self._open_until, self._pauses = None, 1

    def _open(self, now: float) -> None:
        self._open_until = now + self._pause_s * self._pauses
        self._failures.clear()


class Limiter:
    """Adapts ``limit`` to the server's capacity.

    * A refused start halves the limit, once per round: starts that began before the cut were sent under the old limit
      and cannot cut again. Otherwise it grows by 1 per round (AIMD: Chiu and Jain 1989, Computer Networks 17(1)).
    * It grows only while fewer than ``ALPHA`` starts queue at the server, and shrinks by 1 per round above ``BETA``.
      With L starts in flight, the fastest taking b and this one t seconds, L (1 − b / t) of them wait
      (TCP Vegas: Brakmo and Peterson 1995, IEEE JSAC 13(8); used for services by Netflix's concurrency-limits).
    * Until the first sign of a queue it doubles per round (TCP slow start).

    A control plane that creates instances one at a time therefore sees a handful of requests, never hundreds.
    """

    def __init__(self, first: int, most: int, quick_s: float) -> None:
        """``quick_s``: starts faster than this are no sign of a queue, regardless of the fastest."""
        self.limit = float(first)
        self.under_way = 0
        self._most = float(most)
        self._quick_s = quick_s
        self._fastest = float("inf")
        self._cut_at = float("-inf")
        self._doubling = True

    def begin(self) -> bool:
        """Return whether one more may start now. If so, it is in flight until ``end``."""
        if self.under_way >= int(self.limit):
            return False
        self.under_way += 1
        return True

    def end(self, began: float, now: float, result: Result) -> None:
        """Record the end of a start. ``began``, ``now``: seconds on the same clock."""
        full = self.under_way >= int(self.limit)
        self.under_way -= 1
        if result == "refused":
            self._refused(began, now)
        elif result == "started":
            self._started(now - began, full)

    def _refused(self, began: float, now: float) -> None:
        self._doubling = False
        if began >= self._cut_at:
            self.limit = max(1.0, self.limit * CUT)
            self._cut_at = now

    def _started(self, seconds: float, full: bool) -> None:
        self._fastest = min(self._fastest, seconds)
        queued = self.limit * (1 - self._fastest / seconds) if seconds > self._quick_s else 0.0
        if queued > ALPHA:
            self._doubling = False
        if queued > BETA:
            self.limit = max(1.0, self.limit - 1 / self.limit)
        elif queued <= ALPHA and full:  # an unused limit says nothing about a higher one
            self.limit = min(self._most, self.limit + (1.0 if self._doubling else 1 / self.limit))
