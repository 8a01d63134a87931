"""Worker process that plays collections against an OpenAI-compatible endpoint, in the episode environment.

``python -m megatron_fleet.rollout.chat_worker`` exchanges ``chat_messages`` on stdin and stdout, and exits when stdin
closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

from megatron_fleet.agents.chat_client import ChatClient
from megatron_fleet.agents.chat_conversation import run_chat_episode
from megatron_fleet.agents.settings import EpisodeSettings
from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.config.schema import AgentConfig, EnvConfig, RolloutConfig
from megatron_fleet.config.sections.evaluation import EndpointConfig
from megatron_fleet.envs.provision import ProvisionedEnvironment
from megatron_fleet.rollout.budget import budget
from megatron_fleet.rollout.chat_messages import Ended, Frames, Report, Setup
from megatron_fleet.rollout.collection import Collection
from megatron_fleet.rollout.requests import CollectRequest, EpisodeSpec
from megatron_fleet.rollout.worker import EpisodeRunner, episode_seed

REPORT_S = 0.5
"""Seconds between two progress reports of a running collection."""


class ChatWorker(EpisodeRunner):
    """Episode runner for the model behind an endpoint; plays one collection at a time."""

    def __init__(self, setup: Setup) -> None:
        """
        Raises:
            UserError: the prompts file is invalid.
        """
        rollout: RolloutConfig = RolloutConfig.model_validate(setup.rollout)
        rollout = rollout.model_copy(update={"workers": 1})  # this process has all slots
        env, endpoint = EnvConfig.model_validate(setup.env), EndpointConfig.model_validate(setup.endpoint)
        super().__init__(rollout, env, setup.env_url)
        self._rollout = rollout
        self._numbers = itertools.count()
        self._settings = EpisodeSettings.from_config(rollout, env, AgentConfig.model_validate(setup.agent))
        self._client = ChatClient(endpoint, rollout.engine.request_timeout_s, setup.dialect)

    async def _episode(self, spec: EpisodeSpec, environment: ProvisionedEnvironment) -> Trajectory:
        settings = dataclasses.replace(self._settings, temperature=spec.temperature)
        return await run_chat_episode(
            spec.task, spec.group, spec.sample, environment, self._client, settings, episode_seed(spec)
        )

    async def collect(self, request: CollectRequest, report: Callable[[Report], None]) -> Ended:
        """Play every episode of ``request``; ``report`` is called twice a second.

        When the endpoint is dead, unfinished episodes are given up as ``aborted``.
        """
        started = time.monotonic()
        collection = Collection(request, self._rollout.max_retries, next(self._numbers))
        async with budget(request.budget_s, partial(self._stop, collection)), _reporting(collection, report):
            await self._play_all(collection)
        return Ended(collection.result(time.monotonic() - started), self._client.dead)

    async def close(self) -> None:
        """Close the connections. No collection may be running."""
        await self._client.close()

    async def _play_all(self, collection: Collection) -> None:
        changed = asyncio.Condition()
        places = self._rollout.episodes_in_flight + self._env_config.provisioning.lookahead
        async with asyncio.TaskGroup() as lanes:
            for _ in range(min(places, collection.progress().total)):
                lanes.create_task(self._lane(collection, changed))

    async def _lane(self, collection: Collection, changed: asyncio.Condition) -> None:
        """Play episodes sequentially until none is left."""
        while not collection.done:
            if self._client.dead is not None:
                await self._stop(collection, self._client.dead)
            specs = collection.take(1)
            if not specs:
                async with changed:  # an episode of another lane may be retried
                    if not collection.done and not collection.waiting:
                        await changed.wait()
                continue
            (trajectory,) = await self.run(specs)
            collection.ended(specs[0], trajectory)
            async with changed:
                changed.notify_all()

    async def _stop(self, collection: Collection, reason: str) -> None:
        collection.stop(reason)
        await self.abort(collection.number)


@contextlib.asynccontextmanager
async def _reporting(collection: Collection, report: Callable[[Report], None]) -> AsyncIterator[None]:
    async def again() -> None:
        reported = 0
        while True:
            await asyncio.sleep(REPORT_S)
            ended = collection.kept(reported)
            reported += len(ended)
            report(Report(collection.progress(), ended))

    reporting = asyncio.create_task(again())
    try:
        yield
    finally:
        reporting.cancel()


async def serve(worker: ChatWorker, frames: Frames) -> None:
    """Serve requests sequentially until the input ends."""
    coming = asyncio.create_task(frames.read())
    try:
        while (request := await coming) is not None:
            coming = asyncio.create_task(frames.read())
            playing = asyncio.create_task(worker.collect(request, frames.write))
            await asyncio.wait({coming, playing}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():  # the input ended: the requester is gone
                playing.cancel()
                await asyncio.wait({playing})
                return
            frames.write(playing.result())
    finally:
        coming.cancel()
        await worker.close()


async def _main() -> None:
    source, target = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # other output must not mix with the frames on stdout
    frames = await Frames.open(source, target)
    if (setup := await frames.read()) is not None:
        await serve(ChatWorker(setup), frames)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(_main())
