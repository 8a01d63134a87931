"""Base class of all samplers, which run as engine actors, and the registry of samplers by name.

Token ids are exchanged over the actor's socket (``engine_server``); Ray transports only control: start, weight updates,
scoring and statistics. A Ray call per turn would cost more CPU than the model of a small run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.cluster.launcher import write_output_to
from megatron_fleet.config.extension import Interface, load_named
from megatron_fleet.config.schema import Config
from megatron_fleet.config.secrets import take_secrets
from megatron_fleet.models.images import PlacedImage
from megatron_fleet.platform.processes import stacks_written_after, take_normal_priority, write_stacks_on_signal
from megatron_fleet.rollout.engine_server import EngineServer
from megatron_fleet.rollout.engine_statistics import EngineStatistics

WATCH_INTERVAL_S = 0.25
STACKS_AFTER = 0.9
"""Fraction of a deadline after which the stacks of the engine's processes are written to its log."""


class Sampler(ABC):
    """One engine replica. Only its `EngineSlot` calls its methods."""

    def __init__(self, config: Config, token: str, log: Path, transport: str, secrets: Mapping[str, str] | None = None):
        """Args: ``transport``: name of the weight transport. ``secrets``: environment variables that it reads."""
        write_output_to(log)
        write_stacks_on_signal()
        take_normal_priority()
        take_secrets(secrets or {})
        self._config, self._transport, self._log = config, transport, log
        self._server = EngineServer(self._generate, token)
        self._changes = 0
        self._changing = False
        self._unusable: str | None = None
        self._tokens = 0

    async def listen(self, host: str) -> str:
        """Bind the socket and return its address; requests wait until ``serve``."""
        return await self._server.listen(host)

    @abstractmethod
    async def start(self) -> None:
        """Get ready to sample with the model's initial weights, as version 0. May block this actor."""

    async def serve(self) -> None:
        """Begin to answer requests, with the current weights."""
        self._server.open()

    @abstractmethod
    async def _generate(
        self, prompt: list[int], params: SamplingParams, session: str, images: Sequence[PlacedImage]
    ) -> Generation:
        """Sample one turn, with the weight version of each token; count the tokens in ``_tokens``.

        Raises:
            EngineLost: the sampler cannot serve any more.
            ValueError: it refuses the request.
        """

    @abstractmethod
    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Compute the log-probs of given tokens under the current weights at temperature 1.

        Args:
            sequences: int32 ``[T]`` each.

        Returns:
            float32 ``[T]`` each; entry t is log π(token t | tokens before it), entry 0 is 0.

        Raises:
            ValueError: a sequence contains image placeholders.
        """

    async def open_transport(self, init_info: Mapping[str, object]) -> None:  # noqa: B027 (not every sampler has something to do)
        """Initialise the engine's side of the transport, if it has one."""

    async def begin_update(self) -> None:  # noqa: B027 (not every sampler has something to do)
        """Stop sampling until ``finish_update``, if tokens of both versions could mix otherwise."""

    @abstractmethod
    async def load(self, message: Mapping[str, object]) -> None:
        """Load the weights of one update message."""

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Complete the update, and stamp all tokens sampled from now on with ``version``."""

    async def sleep(self) -> str | None:
        """Release the devices; returns why no memory was freed, if so."""
        return "this sampler has no device"

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:  # noqa: B027 (not every sampler has something to do)
        """Allocate memory for ``part``: first the weights, which then need an update, then the KV cache, to resume."""

    async def interrupt(self) -> None:
        """Wait until all requests are answered, because the engine is to leave. A sampler that can stop answers them
        with the tokens sampled so far, as ``interrupted``."""
        await self._server.finish()

    async def usable(self) -> bool:
        return self._unusable is None

    async def watch(self) -> str:
        """Wait until the engine can no longer serve; returns the reason."""
        while await self.usable():
            await asyncio.sleep(WATCH_INTERVAL_S)
        return self._why_unusable()

    def _why_unusable(self) -> str:
        return self._unusable or ""

    @contextlib.asynccontextmanager
    async def _updating(self, what: str = "its weight update") -> AsyncIterator[None]:
        """Mark the engine as unusable, to be replaced, if the block fails: its model may be partly updated."""
        if self._unusable is not None:
            raise RuntimeError(self._unusable)
        limit = self._config.rollout.engine.update_timeout_s
        self._changing, self._changes = True, self._changes + 1
        try:
            with stacks_written_after(STACKS_AFTER * limit):
                async with asyncio.timeout(limit):
                    yield
        except BaseException as error:
            self._unusable = f"{what} failed: {type(error).__name__}: {error}"
            raise RuntimeError(self._unusable) from error
        finally:
            self._changing = False

    async def read_statistics(self) -> EngineStatistics:
        """Return the engine's statistics since the last call."""
        return EngineStatistics()

    async def sampled_tokens(self) -> int:
        """Return the number of tokens sampled since the start."""
        return self._tokens

    async def processes(self) -> list[int]:
        """Return the pids of this actor and all its child processes."""
        import psutil

        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    async def shutdown(self) -> None:
        self._server.close()


class SamplerFactory(Protocol):
    def __call__(self, config: Config, token: str, log: Path, transport: str, secrets: Mapping[str, str], /) -> Sampler:
        """Make a sampler in an actor of its own; see `Sampler`."""
        ...


OWN_SAMPLER = Interface(
    "rollout.sampler", "sampler", SamplerFactory, "engines", ("start", "score", "load", "finish_update")
)

SAMPLERS: dict[str, str] = {
    "vllm": "megatron_fleet.rollout.engine_actor:EngineActor",
    "hosted": "megatron_fleet.hosted.sampler:HostedSampler",
}
"""Class of each sampler by name, as ``module:Class``; imported only when it is used."""


def sampler_class(name: str) -> SamplerFactory:
    """Look up a sampler by name, or a user's own by path.

    Raises:
        UserError: the user's own cannot be imported.
    """
    found: SamplerFactory = load_named(OWN_SAMPLER, SAMPLERS, name)
    return found
