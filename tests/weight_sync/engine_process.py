"""Real vLLM engines in processes of their own, as `WeightReceiver`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

NEVER_S = 3600.0
"""For deadlines of a broadcast: who is to notice a death at once does not notice it by waiting."""


class Template:
    """A process that has imported vLLM and done nothing else. Engines are its forks: the imports take 13 s of CPU."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("vllm_process.py"), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def fork(self, arguments: list[str], descriptors: list[int]) -> psutil.Process:
        """Start an engine in this process's environment. Descriptors: its stdin, its output and that of its answers."""
        request = json.dumps([arguments, dict(os.environ)]).encode()
        socket.send_fds(self._requests, [request], descriptors)
        answer = self._requests.recv(64)
        assert answer, "the process that has imported vLLM ended"
        return psutil.Process(int(answer))


@functools.cache
def template() -> Template:
    return Template()


class EngineProcess:
    """A ``vllm_process.py``. Its log is beside the answers of every failure."""

    def __init__(self, folder: Path, log: Path, dtype: str = "float32", transport: str = "shm", **more: Any) -> None:
        """Args: ``more``: for vLLM."""
        answers, answering = os.pipe()
        asked, asking = os.pipe()
        self.log = log
        with log.open("w") as stream:
            arguments = [str(folder), dtype, transport, json.dumps(more)]
            self.process = template().fork(arguments, [asked, stream.fileno(), answering])
        os.close(answering)
        os.close(asked)
        self._answers, self._questions = os.fdopen(answers), os.fdopen(asking, "w")

    def ask(self, *command: Any) -> Any:
        """Raises RuntimeError when the engine refuses, EOFError when it is gone."""
        try:
            print(json.dumps(command), file=self._questions, flush=True)
        except BrokenPipeError:
            raise EOFError from None
        line = self._answers.readline()
        if not line:
            raise EOFError(f"the engine ended: {self.log.read_text()[-3000:]}")
        outcome, answer = json.loads(line)
        if outcome == "failed":
            raise RuntimeError(answer)
        return answer

    def kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.process.kill()

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self._answers.close()
        with contextlib.suppress(BrokenPipeError):  # a question that nobody read
            self._questions.close()


class Engines:
    """`WeightReceiver`. An engine that fails in an update is killed and left out, as a rollout does it.

    Attributes:
        left: engines that have not failed.
        calls: the verbs.
        version: of the last update that was finished.
        last_message: with it.
        failures: what the others said.
    """

    def __init__(self, *engines: EngineProcess) -> None:
        self.left = list(engines)
        self.calls: list[str] = []
        self.failures: list[str] = []
        self.version: int | None = None
        self.last_message: Mapping[str, Any] | None = None

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        await self._all("open", "init_weight_transfer_engine", dict(init_info))

    async def begin_update(self) -> None:
        await self._all("begin", "start_weight_update")

    async def load(self, message: Mapping[str, Any]) -> None:
        await self._all("load", "update_weights", dict(message))

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        await self._all("finish", "finish_weight_update")
        self.version, self.last_message = version, message

    async def _all(self, verb: str, *command: Any) -> None:
        self.calls.append(verb)
        asked = self.left.copy()
        answers = [asyncio.to_thread(engine.ask, "rpc", *command) for engine in asked]
        for engine, answer in zip(asked, await asyncio.gather(*answers, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException):
                self.failures.append(str(answer))
                self.left.remove(engine)
                engine.kill()
