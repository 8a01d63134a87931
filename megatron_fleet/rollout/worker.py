"""Episode worker: plays many episodes concurrently in one process of the episode environment.

A failed episode yields a trajectory, not an exception.

``EpisodeWorker`` is a plain async class; ``rollout.actors`` wraps it as a Ray actor.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.trajectory import Outcome, Trajectory, environment_failed
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AgentConfig, EnvConfig, RolloutConfig
from megatron_fleet.envs.provision import Provisioner, Quarantined
from megatron_fleet.envs.registry import make_environment
from megatron_fleet.rollout.policy import EndpointAccess, EngineAccess, make_policy
from megatron_fleet.rollout.requests import EpisodeSpec

FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, UserError, ValueError)
"""Exceptions of a program or of its input, which every attempt raises again; others, as lost connections, may pass."""
LAG_INTERVAL_S = 0.05
LAGS_KEPT = 1200
"""Number of newest samples of the lag kept: one minute."""
LAG_WARN_S = 1.0

log = logging.getLogger(__name__)


class EpisodeWorker:
    """Player of episodes on one event loop."""

    def __init__(
        self,
        access: EngineAccess | EndpointAccess,
        rollout: dict[str, Any],
        env: dict[str, Any],
        agent: dict[str, Any],
        env_url: str,
        env_token: str = "",
    ) -> None:
        """``rollout``, ``env`` and ``agent`` are the dumped configuration sections of those names.

        Args:
            access: where the model is that plays the episodes.
            env_token: token for the run's own environment server.

        Raises:
            UserError: the tokenizer folder, the endpoint's key or the prompts file is invalid.
        """
        rollout_config: RolloutConfig = RolloutConfig.model_validate(rollout)
        env_config = EnvConfig.model_validate(env)
        settings = EpisodeSettings.from_config(rollout_config, env_config, AgentConfig.model_validate(agent))
        self.policy = make_policy(access, rollout_config, settings)
        self._env_config, self._env_url, self._env_token = env_config, env_url, env_token
        self._provisioner = Provisioner(env_config.provisioning)
        most = {"rollout": rollout_config.most_in_flight(endpoint=isinstance(access, EndpointAccess))}
        if isinstance(access, EngineAccess):
            most["eval"] = rollout_config.most_evaluated(len(access.eval_addresses))
        self._places = {
            kind: _Places(math.ceil(count / rollout_config.workers), env_config.provisioning.lookahead)
            for kind, count in most.items()
        }
        self._lag = LoopLag()
        self._running: dict[asyncio.Task[Trajectory], int] = {}
        self._aborted: set[int] = set()

    async def play(self, spec: EpisodeSpec) -> Trajectory:
        """Play an episode. Concurrent calls share the worker's slots."""
        episode = asyncio.create_task(self._play(spec))
        self._running[episode] = spec.collection
        if spec.collection in self._aborted:  # Ray may deliver an episode after its abort
            episode.cancel()
        with self._lag.watching():
            try:
                (result,) = await asyncio.gather(episode, return_exceptions=True)
            finally:
                del self._running[episode]
        trajectory = _as_trajectory(spec, result)
        trajectory.group, trajectory.sample = spec.group, spec.sample
        trajectory.metrics["loop_lag_p99"] = self._lag.quantile(0.99)
        return trajectory

    async def abort(self, collection: int) -> None:
        """Stop every running, waiting or future episode of ``collection``; ``play`` returns them as ``aborted``."""
        self._aborted.add(collection)
        episodes = [episode for episode, number in self._running.items() if number == collection]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    async def forget_failures(self) -> None:
        """Reset limiters and circuit breakers, because the failed environment server was replaced."""
        self._provisioner = Provisioner(self._env_config.provisioning)

    async def _play(self, spec: EpisodeSpec) -> Trajectory:
        """Play one episode, unless its environment is in quarantine."""
        env_key = spec.task.env_key
        async with self._places[spec.engines].started:
            provisioner = self._provisioner
            try:
                ticket = provisioner.admit(env_key)
            except Quarantined as refused:
                trajectory = _not_played(spec, Outcome.ENV_FAILED, str(refused))
                trajectory.metrics |= {"quarantined": 1.0, **provisioner.gauges(env_key)}
                return trajectory
            failed, reason = None, ""
            try:
                trajectory = await self._play_admitted(spec, provisioner)
                failed, reason = environment_failed(trajectory.outcome, trajectory.reward), trajectory.reward_reason
            finally:
                provisioner.ended(env_key, ticket, failed, reason)
        trajectory.metrics |= provisioner.gauges(env_key)
        return trajectory

    async def _play_admitted(self, spec: EpisodeSpec, provisioner: Provisioner) -> Trajectory:
        """Start the environment, wait for a slot, and play the episode."""
        inner = make_environment(self._env_config, self._env_url, spec.name, self._env_token)
        environment = provisioner.environment(spec.task.env_key, inner)
        try:
            await environment.start(spec.task)
            async with self._places[spec.engines].playing:
                trajectory = await self.policy.play(spec, environment)
        finally:
            await environment.close()
        trajectory.metrics |= environment.metrics
        return trajectory


class _Places:
    """Places of a worker for the episodes of one kind of engines. The other kind's do not take them.

    Attributes:
        started, playing: held by an episode whose environment is started, and by one that plays.
    """

    def __init__(self, playing: int, lookahead: int) -> None:
        self.started, self.playing = asyncio.Semaphore(playing + lookahead), asyncio.Semaphore(playing)


def _as_trajectory(spec: EpisodeSpec, result: Trajectory | BaseException) -> Trajectory:
    if isinstance(result, Trajectory):
        return result
    if isinstance(result, asyncio.CancelledError):
        outcome, reason = Outcome.ABORTED, "the run was stopped"
    else:
        outcome = Outcome.REFUSED if isinstance(result, FAULTS) else Outcome.ABORTED
        log.error("episode %d of task %s failed inside the worker", spec.sample, spec.task.key, exc_info=result)
        reason = f"internal error: {type(result).__name__}: {result}"
    return _not_played(spec, outcome, reason)


def _not_played(spec: EpisodeSpec, outcome: Outcome, reason: str) -> Trajectory:
    return TrajectoryBuilder().build(spec.task, outcome, None, reason, None)


class LoopLag:
    """Sampler of the running loop's lag, the delay that blocking calls cause for all other tasks; active inside
    ``watching``.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=LAGS_KEPT)
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample inside the context, which can be entered several times at once. Needs a running loop."""
        self._watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._task.cancel()
                self._task = None

    def quantile(self, q: float) -> float:
        """Return the ``q`` quantile of the lag in seconds; 0 without samples."""
        ordered = sorted(self._samples)
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            lag = max(0.0, clock() - due)
            self._samples.append(lag)
            if lag > LAG_WARN_S:
                log.warning("the event loop was blocked for %.1f s", lag)
