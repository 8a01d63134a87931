"""Episode worker: plays many episodes concurrently in one process of the episode environment.

A failed episode yields a trajectory, not an exception.

``EpisodeWorker`` is a plain async class; ``rollout.actors`` wraps it as a Ray actor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.kinds import make_agent
from megatron_fleet.agents.settings import EpisodeSettings, stable_seed
from megatron_fleet.agents.trajectory import Outcome, Trajectory, environment_failed
from megatron_fleet.config.schema import AgentConfig, EnvConfig, RolloutConfig
from megatron_fleet.envs.provision import ProvisionedEnvironment, Provisioner, Quarantined
from megatron_fleet.envs.registry import environment_token, make_environment
from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.rollout.engine_client import connect
from megatron_fleet.rollout.loop_lag import LoopLag
from megatron_fleet.rollout.requests import EpisodeSpec

log = logging.getLogger(__name__)


class EpisodeRunner(ABC):
    """Runner of batches of episodes on one event loop. Subclasses provide the model that plays them."""

    def __init__(self, rollout: RolloutConfig, env: EnvConfig, env_url: str, env_token: str = "") -> None:
        """Args: ``env_token``: token for the run's own environment server."""
        self._env_config, self._env_url, self._env_token = env, env_url, env_token
        places = math.ceil(rollout.episodes_in_flight / rollout.workers)
        self._provisioner = Provisioner(env.provisioning)
        self._started = asyncio.Semaphore(places + env.provisioning.lookahead)
        self._slots = asyncio.Semaphore(places)
        self._lag = LoopLag()
        self._running: dict[asyncio.Task[Trajectory], int] = {}
        self._aborted: set[int] = set()

    async def run(self, batch: Sequence[EpisodeSpec]) -> list[Trajectory]:
        """Play ``batch``; returns one trajectory per spec, in order. Concurrent calls share the worker's slots."""
        episodes = [asyncio.create_task(self._play(spec)) for spec in batch]
        for spec, episode in zip(batch, episodes, strict=True):
            self._running[episode] = spec.collection
            if spec.collection in self._aborted:  # Ray may deliver a batch after its abort
                episode.cancel()
        with self._lag.watching():
            try:
                results = await asyncio.gather(*episodes, return_exceptions=True)
            finally:
                for episode in episodes:
                    del self._running[episode]
        lag = self._lag.quantile(0.99)
        trajectories = [_as_trajectory(spec, result) for spec, result in zip(batch, results, strict=True)]
        for trajectory in trajectories:
            trajectory.metrics["loop_lag_p99"] = lag
        return trajectories

    async def abort(self, collection: int) -> None:
        """Stop every running, waiting or future episode of ``collection``; ``run`` returns them as ``aborted``."""
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
        async with self._started:
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
        inner = make_environment(self._env_config, self._env_url, _name(spec), self._env_token)
        environment = provisioner.environment(spec.task.env_key, inner)
        try:
            await environment.start(spec.task)
            async with self._slots:
                trajectory = await self._episode(spec, environment)
        finally:
            await environment.close()
        trajectory.metrics |= environment.metrics
        return trajectory

    @abstractmethod
    async def _episode(self, spec: EpisodeSpec, environment: ProvisionedEnvironment) -> Trajectory:
        """Play one episode in an environment that has been started."""


class EpisodeWorker(EpisodeRunner):
    """Episode runner for the policy that the engines serve."""

    def __init__(
        self,
        tokenizer_folder: str,
        rollout: dict[str, Any],
        env: dict[str, Any],
        agent: dict[str, Any],
        env_url: str,
        endpoints: Sequence[str],
        token: str,
        host: str = "",
    ) -> None:
        """``rollout``, ``env`` and ``agent`` are the dumped configuration sections of those names.

        Args:
            token: the run's secret.
            host: address of this host; local engines are preferred.

        Raises:
            UserError: the tokenizer folder or the prompts file is invalid.
        """
        rollout_config: RolloutConfig = RolloutConfig.model_validate(rollout)
        env_config = EnvConfig.model_validate(env)
        super().__init__(rollout_config, env_config, env_url, environment_token(token))
        self._settings = EpisodeSettings.from_config(rollout_config, env_config, AgentConfig.model_validate(agent))
        self._renderer = make_renderer(tokenizer_folder, rollout_config.thinking, rollout_config.renderer)
        self._engine = connect(endpoints, token, rollout_config.engine.request_timeout_s, host)
        self._agent = make_agent(self._settings.agent.kind)

    def engine_moved(self, before: str, now: str) -> None:
        """See `EnginePool.moved`."""
        self._engine.moved(before, now)

    async def _episode(self, spec: EpisodeSpec, environment: ProvisionedEnvironment) -> Trajectory:
        settings = dataclasses.replace(
            self._settings,
            temperature=spec.temperature,
            routing=self._settings.routing and spec.trained,
            images=not spec.trained,
        )
        return await self._agent(
            spec.task,
            spec.group,
            spec.sample,
            environment,
            self._engine,
            self._renderer,
            settings,
            episode_seed(spec),
            f"{spec.collection}/{_name(spec)}",  # engines keep caches by session
        )


def episode_seed(spec: EpisodeSpec) -> int | None:
    """Return a seed that differs between any two episodes; ``None``: unseeded.

    Retries of an episode have the same seed, so a failed component or verifier costs time but does not change tokens,
    and failures of the environment do not bias the sampled episodes.
    """
    if spec.seed is None:
        return None
    # The 0 once was the attempt; it keeps the results of existing seeds unchanged.
    return stable_seed(spec.seed, spec.step, spec.task.key, spec.sample, 0)


def _name(spec: EpisodeSpec) -> str:
    """Name the episode for the environment; equal runs give equal names."""
    return f"{spec.step}/{spec.group}/{spec.sample}/{spec.attempt}/{spec.task.key}"


def _as_trajectory(spec: EpisodeSpec, result: Trajectory | BaseException) -> Trajectory:
    if isinstance(result, Trajectory):
        return result
    if isinstance(result, asyncio.CancelledError):
        reason = "the run was stopped"
    else:
        log.error("episode %d of task %s failed inside the worker", spec.sample, spec.task.key, exc_info=result)
        reason = f"internal error: {type(result).__name__}: {result}"
    return _not_played(spec, Outcome.ABORTED, reason)


def _not_played(spec: EpisodeSpec, outcome: Outcome, reason: str) -> Trajectory:
    return TrajectoryBuilder().build(spec.task, spec.group, spec.sample, outcome, None, reason, None)
