"""Who has the devices: the trainer, or the engines that share them. One object owns the phase.

A cycle is *train → sync → roll*::

    train    the trainer has everything on its devices; the engines sleep
    sync     of the trainer the parameters; of the engines memory for weights, which they receive
    roll     nothing of the trainer; the engines are awake

What leaves goes before what comes: engines sleep before the trainer is onloaded, gradients and optimizer states are
offloaded before the engines' weights wake, the parameters before the KV cache does, on all ranks each time. Engines on
devices of their own take part in the phases too, but nothing moves.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, final

from megatron_fleet.config.schema import Config
from megatron_fleet.loop.memory_budget import GIB, Limits, MemoryBudget
from megatron_fleet.trainer.base import PARTS, Part, Trainer

Action = Callable[[], Awaitable[None]]


class Phase(StrEnum):
    """See the module."""

    TRAIN = "train"
    SYNC = "sync"
    ROLL = "roll"


FOLLOWS: Mapping[Phase, frozenset[Phase]] = {
    Phase.TRAIN: frozenset({Phase.SYNC}),
    Phase.SYNC: frozenset({Phase.ROLL}),
    Phase.ROLL: frozenset({Phase.TRAIN}),
}
"""What may come after a phase. After a change that failed, nothing may but `Colocation.restart`."""


class WrongPhase(RuntimeError):
    """An order that the present phase does not allow."""


class Engines(Protocol):
    """All engines of a rollout at once; each method returns when all engines are done."""

    async def sleep(self) -> str | None:
        """Free the devices, whatever is awake; weights are lost. Returns why no memory was freed, if so."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take memory for the weights (uninitialised), or for the KV cache and serve."""
        ...


@final
class Colocation:
    """The phases of a run. `restart` or `open_colocation` begins them with phase ``train``."""

    def __init__(self, trainer: Trainer, engines: Engines, budget: MemoryBudget, colocated: bool) -> None:
        """Args: ``colocated``: trainer and engines share devices; the engines sleep now."""
        self._trainer, self._engines, self._budget, self._colocated = trainer, engines, budget, colocated
        self._phase: Phase | None = None
        self._awake = False
        self._seconds: dict[str, float] = {}

    async def restart(self, start: Action) -> None:
        """Run ``start``, which starts the trainer anew with everything on its devices; then the phase is ``train``.

        Engines that share the devices sleep before, in whatever phase the old trainer was lost, or a change failed.
        """
        self._phase = None
        if self._awake:
            await self._sleep()
        await start()
        await self._budget.enter(Phase.TRAIN)
        self._phase = Phase.TRAIN

    async def to_trainer(self) -> None:
        """From ``roll`` to ``train``: the engines sleep, then everything of the trainer is onloaded."""
        async with self._entering(Phase.TRAIN):
            if self._colocated:
                await self._sleep()
                with self._timed("onload"):
                    await self._trainer.onload(PARTS)

    async def to_engines(self, sync: Action) -> None:
        """From ``train`` over ``sync`` to ``roll``; ``sync`` puts the present weights on every engine."""
        async with self._entering(Phase.SYNC):
            if self._colocated:
                with self._timed("offload"):
                    await self._trainer.offload(("gradients", "optimizer"))
                await self._wake("weights")
        await sync()
        async with self._entering(Phase.ROLL):
            if self._colocated:
                with self._timed("offload"):
                    await self._trainer.offload(PARTS)
                await self._wake("kv_cache")
        self._budget.write()

    @asynccontextmanager
    async def borrowed(self, sync: Action) -> AsyncIterator[None]:
        """Inside ``train``, afterwards ``roll`` again; ``sync`` repeats the weights for engines that lost them."""
        await self.to_trainer()
        yield
        await self.to_engines(sync if self._colocated else _nothing)

    @asynccontextmanager
    async def with_parameters(self) -> AsyncIterator[None]:
        """Inside, the trainer has its parameters on its devices; in ``roll`` they are brought there for so long."""
        parameters: tuple[Part, ...] = ("parameters",)
        brought = self._colocated and self._phase is Phase.ROLL
        if brought:
            await self._trainer.onload(parameters)
        try:
            yield
        finally:
            # When the next phase has begun to be entered, it is the one that decides what is where.
            if brought and self._phase is Phase.ROLL:
                await self._trainer.offload(parameters)

    def memory(self) -> dict[str, float]:
        """Metrics, see `MemoryBudget.metrics`."""
        return self._budget.metrics()

    def read_seconds(self) -> dict[str, float]:
        """Seconds of ``offload``, ``onload``, ``engines_sleep`` and ``engines_wake`` since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    async def _sleep(self) -> None:
        with self._timed("engines_sleep"):
            self._budget.remark = await self._engines.sleep()
        self._awake = False

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        self._awake = True  # perhaps in part, when it fails
        with self._timed("engines_wake"):
            await self._engines.wake(part)

    @asynccontextmanager
    async def _entering(self, phase: Phase) -> AsyncIterator[None]:
        if self._phase is None or phase not in FOLLOWS[self._phase]:
            now = "after a change of phase that failed" if self._phase is None else f"in phase {self._phase.value!r}"
            raise WrongPhase(f"phase {phase.value!r} cannot begin {now}")
        before, self._phase = self._phase, None
        await self._budget.leave(quiet=before is Phase.TRAIN)
        yield
        await self._budget.enter(phase)
        self._phase = phase

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began


async def _nothing() -> None:
    pass


def limits(sizes: Mapping[str, int], residual: int) -> Limits:
    """Most bytes that a rank may hold in each phase when trainer and engines share devices.

    Args:
        sizes: bytes of the trainer's parts on this rank.
        residual: bytes that a side may leave behind: contexts, caches, communicators.
    """
    offloaded: dict[str, int] = dict.fromkeys(PARTS, 0)
    rest = {"other": residual, "communicators": residual}
    return {
        Phase.TRAIN: {**sizes, "engine": residual},
        Phase.SYNC: {**offloaded, "parameters": sizes["parameters"], **rest},
        Phase.ROLL: {**offloaded, **rest},
    }


async def open_colocation(config: Config, trainer: Trainer, engines: Engines) -> Colocation:
    """The phases of a run, in phase ``train``. Engines that share the trainer's devices sleep already.

    Args:
        config: with ``rollout.engine.colocated`` as the placement decided.
    """
    colocated, residual = bool(config.rollout.engine.colocated), int(config.rollout.engine.residual_gib * GIB)
    allowed = [limits(sizes, residual) for sizes in trainer.info.part_bytes] if colocated else []
    budget = MemoryBudget(trainer, allowed, Path(config.run.out) / "memory.json")
    colocation = Colocation(trainer, engines, budget, colocated)
    await colocation.restart(_nothing)
    return colocation
