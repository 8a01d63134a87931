"""Plays many episodes concurrently in one process of the episode environment. A failed episode is data.

``EpisodeWorker`` is a plain async class; the RolloutManager wraps it as a Ray actor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

from megatron_fleet.agents.builder import TrajectoryBuilder
from megatron_fleet.agents.episode import EpisodeSettings, run_episode, stable_seed
from megatron_fleet.agents.renderer import Qwen3Renderer
from megatron_fleet.agents.tokenizer import Tokenizer
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.config.schema import Env, Rollout
from megatron_fleet.envs.openenv import make_environment
from megatron_fleet.rollout.engine_client import connect
from megatron_fleet.rollout.requests import EpisodeSpec

log = logging.getLogger(__name__)


class EpisodeWorker:
    """Runs batches of episodes on one event loop."""

    def __init__(
        self,
        tokenizer_folder: str,
        rollout: dict[str, Any],
        env: dict[str, Any],
        env_url: str,
        endpoints: Sequence[str],
        token: str,
    ) -> None:
        """``rollout`` and ``env`` are the dumped configuration sections of those names.

        Raises:
            UserError: the tokenizer folder cannot be used.
        """
        rollout_config, self._env_config = Rollout.model_validate(rollout), Env.model_validate(env)
        self._settings = EpisodeSettings.from_config(rollout_config, self._env_config)
        self._renderer = Qwen3Renderer(Tokenizer(tokenizer_folder), thinking=rollout_config.thinking)
        self._env_url = env_url
        self._engine = connect(endpoints, token, rollout_config.engine.request_timeout_s)
        self._slots = asyncio.Semaphore(math.ceil(rollout_config.episodes_in_flight / rollout_config.workers))
        self._running: set[asyncio.Task[Trajectory]] = set()

    async def run(self, batch: Sequence[EpisodeSpec]) -> list[Trajectory]:
        """Play ``batch``; one trajectory per spec, in order. Several calls share the worker's slots."""
        episodes = [asyncio.create_task(self._play(spec)) for spec in batch]
        self._running.update(episodes)
        try:
            results = await asyncio.gather(*episodes, return_exceptions=True)
        finally:
            self._running.difference_update(episodes)
        return [_as_trajectory(spec, result) for spec, result in zip(batch, results, strict=True)]

    async def abort(self) -> None:
        """Stop every episode in flight or waiting; their ``run`` returns them as ``aborted``."""
        episodes = list(self._running)
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    async def _play(self, spec: EpisodeSpec) -> Trajectory:
        settings = dataclasses.replace(
            self._settings, temperature=spec.temperature, routing=self._settings.routing and spec.trained
        )
        seed = None
        if spec.seed is not None:
            seed = stable_seed(spec.seed, spec.step, spec.task.key, spec.sample, spec.attempt)
        async with self._slots:
            return await run_episode(
                spec.task,
                spec.group,
                spec.sample,
                make_environment(self._env_config, self._env_url),
                self._engine,
                self._renderer,
                settings,
                seed,
                session=f"{spec.step}/{spec.group}/{spec.sample}/{spec.attempt}/{spec.task.key}",
            )


def _as_trajectory(spec: EpisodeSpec, result: Trajectory | BaseException) -> Trajectory:
    if isinstance(result, Trajectory):
        return result
    if isinstance(result, asyncio.CancelledError):
        reason = "the run was stopped"
    else:
        log.error("episode %d of task %s failed inside the worker", spec.sample, spec.task.key, exc_info=result)
        reason = f"internal error: {type(result).__name__}: {result}"
    return TrajectoryBuilder().build(spec.task, spec.group, spec.sample, Outcome.ABORTED, None, reason, None)
