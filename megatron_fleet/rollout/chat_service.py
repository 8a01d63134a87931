"""ChatService: plays collections with the model behind an OpenAI-compatible endpoint. No engines, no Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_fleet.agents.chat_client import Dialect
from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.config.schema import Config
from megatron_fleet.envs.registry import Start, serve
from megatron_fleet.rollout.chat_messages import Ended, Setup, Told
from megatron_fleet.rollout.requests import CollectRequest, CollectResult, Progress, RolloutFailed

SILENCE_S = 60.0
"""The process says something twice a second; one that is silent for so long hangs."""
START_S = 60.0
STOP_S = 15.0
"""Environments are given back before the process ends."""


class ChatService:
    """The environment server and one process of the episode environment; both end with it. A context manager.

    Attributes:
        dead: why the endpoint answers no more, once that is so.
    """

    def __init__(self, config: Config, dialect: Dialect, out: Path, episode_python: Path) -> None:
        """``dialect``: as ``probe`` found it. ``out``: logs go to ``out/logs``."""
        self.dead: str | None = None
        self._config, self._dialect = config, dialect
        self._logs, self._python = out.resolve() / "logs", episode_python
        self._cleanup = contextlib.ExitStack()
        self._requests: Connection
        self._answers: Connection
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> ChatService:
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def collect(
        self,
        request: CollectRequest,
        on_progress: Callable[[Progress], None] | None = None,
        on_episodes: Callable[[list[Trajectory]], None] | None = None,
    ) -> CollectResult:
        """Play all episodes of ``request``, as ``RolloutService.collect`` does.

        Raises:
            RolloutFailed: the process died or hangs.
        """
        self._send(request)
        silence_s = START_S + SILENCE_S
        while isinstance(frame := self._frame(silence_s), Told):
            silence_s = SILENCE_S
            if on_progress is not None:
                on_progress(frame.progress)
            if on_episodes is not None and frame.ended:
                on_episodes(frame.ended)
        assert isinstance(frame, Ended)
        self.dead = frame.dead
        return frame.result

    def _start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        config = self._config
        start = Start(config.env, self._logs / "env.log", str(self._python), config.run.seed)
        url = self._cleanup.enter_context(serve(start))
        source, self._requests = Pipe(duplex=False)
        self._answers, target = Pipe(duplex=False)
        with source, target, (self._logs / "endpoint.log").open("ab") as log:
            # A session of its own: Ctrl-C is for this process, which then has episodes to put away.
            self._process = subprocess.Popen(
                [str(self._python), "-m", "megatron_fleet.rollout.chat_worker"],
                stdin=source.fileno(),
                stdout=target.fileno(),
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._cleanup.callback(self._stop)
        sections = {"rollout": config.rollout, "env": config.env, "agent": config.agent}
        dumped = {name: section.model_dump() for name, section in sections.items()}
        self._send(Setup(**dumped, endpoint=config.eval.endpoint.model_dump(), dialect=self._dialect, env_url=url))

    def _send(self, frame: Any) -> None:
        with self._process_lives():
            self._requests.send(frame)

    def _frame(self, silence_s: float) -> Any:
        with self._process_lives():
            if not self._answers.poll(silence_s):
                raise TimeoutError
            return self._answers.recv()

    @contextlib.contextmanager
    def _process_lives(self) -> Iterator[None]:
        """Raises RolloutFailed where what is within does not hear of the process."""
        try:
            yield
        except (EOFError, OSError) as error:
            what = "hangs" if isinstance(error, TimeoutError) else "died"
            raise RolloutFailed(
                f"the process that plays the episodes {what}, see {self._logs / 'endpoint.log'}; what ended is kept, "
                f"the same command goes on"
            ) from error

    def _stop(self) -> None:
        self._requests.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
