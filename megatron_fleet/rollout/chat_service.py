"""Chat service: plays collections with the model behind an OpenAI-compatible endpoint. No engines, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_fleet.agents.chat_client import Dialect
from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.config.schema import Config
from megatron_fleet.config.secrets import of_environments, without_secrets
from megatron_fleet.envs.registry import Server, Start, serve
from megatron_fleet.rollout.chat_messages import Ended, Frames, Report, Setup
from megatron_fleet.rollout.requests import CollectRequest, CollectResult, Progress, RolloutFailed

SILENCE_S = 60.0
"""The process reports twice a second; one that is silent for this long counts as hung."""
START_S = 60.0
STOP_S = 15.0
"""Seconds for the process to exit, which includes releasing its environments."""


class ChatService:
    """Owner of the environment server and one process of the episode environment. An async context manager.

    Attributes:
        dead: reason why the endpoint no longer answers; ``None`` while it does.
    """

    def __init__(self, config: Config, dialect: Dialect, out: Path, episode_python: Path) -> None:
        """Args: ``dialect``: as detected by ``probe``. ``out``: logs go to ``out/logs``."""
        self.dead: str | None = None
        self._config, self._dialect = config, dialect
        self._logs, self._python = out.resolve() / "logs", episode_python
        self._cleanup = contextlib.AsyncExitStack()
        self._process: subprocess.Popen[bytes]
        self._frames: Frames

    async def __aenter__(self) -> ChatService:
        try:
            await self._start()
        except BaseException:
            await self._cleanup.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    async def collect(
        self,
        request: CollectRequest,
        on_progress: Callable[[Progress], None] | None = None,
        on_episodes: Callable[[list[Trajectory]], None] | None = None,
    ) -> CollectResult:
        """Play all episodes of ``request`` like ``RolloutService.collect``, but one call at a time. After a cancelled
        call the service can only be closed.

        Raises:
            RolloutFailed: the process died or hangs.
        """
        self._frames.write(request)
        frame = await self._next(START_S + SILENCE_S)
        while isinstance(frame, Report):
            if on_progress is not None:
                on_progress(frame.progress)
            if on_episodes is not None and frame.ended:
                on_episodes(frame.ended)
            frame = await self._next(SILENCE_S)
        assert isinstance(frame, Ended)
        self.dead = frame.dead
        return frame.result

    async def _start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        config = self._config
        start = Start(config.env, self._logs / "env.log", str(self._python), config.run.seed)
        server: Server = await asyncio.to_thread(serve, start)
        self._cleanup.callback(server.stop)
        stdin, requests = os.pipe()
        answers, stdout = os.pipe()
        self._frames = await Frames.open(answers, requests)
        self._cleanup.callback(self._frames.close)
        families, names = of_environments(config), (config.eval.endpoint.api_key_env,)
        try:
            with (self._logs / "endpoint.log").open("ab") as log:
                # In its own session, so that Ctrl-C reaches only this process, which then stops it gracefully.
                self._process = subprocess.Popen(
                    [str(self._python), "-m", "megatron_fleet.rollout.chat_worker"],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=log,
                    env=without_secrets(os.environ, families, names) | {"OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
        finally:
            os.close(stdin)
            os.close(stdout)
        self._cleanup.push_async_callback(self._stop)
        sections = {"rollout": config.rollout, "env": config.env, "agent": config.agent}
        dumped = {name: section.model_dump() for name, section in sections.items()}
        endpoint = config.eval.endpoint.model_dump()
        self._frames.write(Setup(**dumped, endpoint=endpoint, dialect=self._dialect, env_url=server.url))

    async def _next(self, silence_s: float) -> Any:
        """Return the next frame. Raises RolloutFailed when none arrives."""
        try:
            async with asyncio.timeout(silence_s):
                frame = await self._frames.read()
        except TimeoutError:
            raise self._failed("hangs") from None
        if frame is None:
            raise self._failed("died")
        return frame

    def _failed(self, what: str) -> RolloutFailed:
        return RolloutFailed(
            f"the process that plays the episodes {what}, see {self._logs / 'endpoint.log'}; what ended is kept, the "
            f"same command goes on"
        )

    async def _stop(self) -> None:
        self._frames.end()
        try:
            await asyncio.to_thread(self._process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
