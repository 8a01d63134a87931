"""An engine in a process of its own, as a run has it (`rollout.engine_actor`), driven over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from battery import shapes
from megatron_fleet.agents.token_engine import SamplingParams
from megatron_fleet.config.schema import Config
from megatron_fleet.rollout.engine_actor import EngineActor
from megatron_fleet.rollout.engine_arguments import environment

END_S = 20.0


class MeasuredEngine(EngineActor):
    """`EngineActor` with what is measured on it."""

    def __init__(self, more: Mapping[str, Any], config: Config, log: Path, transport: str) -> None:
        """``more``: arguments of vLLM beside those of a run, such as ``load_format``."""
        super().__init__(config, "", log, transport)
        self._more = more

    def _arguments(self, *, cpu: bool, can_sleep: bool) -> dict[str, Any]:
        return {**super()._arguments(cpu=cpu, can_sleep=can_sleep), **self._more}

    async def sample(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """Answer prompts at once, each with ``tokens`` tokens; returns how many were sampled."""
        params = SamplingParams(temperature=1.0, max_tokens=tokens, stop_token_ids=(), seed=0)
        turns = [self._generate(list(prompt), params, str(i), ()) for i, prompt in enumerate(prompts)]
        return sum(len(turn.token_ids) for turn in await asyncio.gather(*turns))

    async def fingerprints(self) -> dict[str, int]:
        """`Fingerprints.fingerprints` of the first worker."""
        found: list[dict[str, int]] = await self._llm.collective_rpc("fingerprints")
        return found[0]


class Fingerprints:
    """Addition to vLLM's worker (``worker_extension_cls``)."""

    def fingerprints(self) -> dict[str, int]:
        """Name of each parameter → a checksum of its bytes that depends on their places."""
        import torch

        worker: Any = self
        found = {}
        for name, parameter in worker.get_model().named_parameters():
            data = parameter.detach().contiguous().view(-1).view(torch.uint8)
            total = 0
            for part in data.split(1 << 24):
                places = torch.arange(len(part), device=part.device) % 65521 + 1
                total = (total * 31 + int((part.to(torch.int64) * places).sum())) % (1 << 61)
            found[name] = total
        return found


def _serve(more: Mapping[str, Any], config: str, log: str, transport: str, control: Connection) -> None:
    """Serve one engine in a child process: read (verb, arguments), answer (seconds, result, error), end at ``None``."""
    actor = MeasuredEngine(more, Config.model_validate_json(config), Path(log), transport)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        while (command := await loop.run_in_executor(None, control.recv)) is not None:
            verb, arguments = command
            began = time.perf_counter()
            try:
                result, error = await getattr(actor, verb)(*arguments), None
            except Exception:
                result, error = None, traceback.format_exc()
            control.send((time.perf_counter() - began, result, error))
        await actor.shutdown()

    asyncio.run(serve())


class Engine:
    """`weight_sync.base.WeightReceiver` of one engine.

    Attributes:
        seconds: verb → seconds in the engine's process when it was called last.
        log: what the engine prints.
    """

    def __init__(self, config: Config, transport: str, log: Path, more: Mapping[str, Any] | None = None) -> None:
        """Start its process; `call` ``start`` next. ``more``: see `MeasuredEngine`."""
        self.seconds: dict[str, float] = {}
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._control, theirs = multiprocessing.Pipe()
        before = dict(os.environ)
        os.environ |= environment(cuda=shapes.cuda())  # a spawned process reads its environment when it starts
        arguments = (dict(more or {}), config.model_dump_json(), str(log), transport, theirs)
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments)
        self._process.start()
        os.environ.clear()
        os.environ |= before
        theirs.close()

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Result of a method of `MeasuredEngine`.

        Raises:
            RuntimeError: it failed, or the process ended.
        """
        try:
            self._control.send((verb, arguments))
            self.seconds[verb], result, error = await asyncio.to_thread(self._control.recv)
        except (EOFError, OSError):
            raise RuntimeError(f"the engine's process ended at {verb}; its log ends with:\n{self._tail()}") from None
        if error is not None:
            raise RuntimeError(f"the engine failed at {verb}:\n{error}")
        return result

    async def open_transport(self, init_info: Mapping[str, Any]) -> None:
        """See `WeightReceiver`, as the next three."""
        await self.call("open_transport", dict(init_info))

    async def begin_update(self) -> None:
        await self.call("begin_update")

    async def load(self, message: Mapping[str, Any]) -> None:
        await self.call("load", dict(message))

    async def finish_update(self, version: int, message: Mapping[str, Any] | None) -> None:
        await self.call("finish_update", version)

    def close(self) -> None:
        """Stop the engine and wait until all its processes have ended: their device memory is free only then."""
        processes = psutil.Process(self._process.pid).children(recursive=True) if self._process.is_alive() else []
        with contextlib.suppress(OSError):
            self._control.send(None)
        self._process.join(END_S)
        self._process.kill()
        self._process.join()
        _, alive = psutil.wait_procs(processes, END_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, END_S)

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-20:])


def random_prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts without common beginnings; other seeds give others, which no prefix cache knows."""
    return np.random.default_rng(seed).integers(0, vocabulary, (count, tokens)).tolist()
