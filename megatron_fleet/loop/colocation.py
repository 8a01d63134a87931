"""Phases of a run: device memory alternates between the trainer and the engines that share its devices.

A cycle is *train → sync → roll*::

    train    the trainer is fully onloaded; the engines sleep
    sync     the trainer's parameters are on the devices; the engines hold weight memory and receive the weights
    roll     the trainer is fully offloaded; the engines are awake

Memory is freed before it is claimed, on all ranks: engines sleep before the trainer is onloaded, gradients and
optimizer states are offloaded before the engines' weights wake, and parameters before the KV cache wakes. Disaggregated
engines go through the same phases, but nothing moves.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, final

from megatron_fleet.config.schema import EngineConfig, RunConfig
from megatron_fleet.loop.memory_budget import GIB, Limits, MemoryBudget
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.trainer.base import PARTS, Part, Ranks, Trainer, TrainerLost

Action = Callable[[], Awaitable[None]]


class Phase(StrEnum):
    """Phase of a cycle; see the module docstring."""

    TRAIN = "train"
    SYNC = "sync"
    ROLL = "roll"


FOLLOWS: Mapping[Phase, frozenset[Phase]] = {
    Phase.TRAIN: frozenset({Phase.SYNC}),
    Phase.SYNC: frozenset({Phase.ROLL}),
    Phase.ROLL: frozenset({Phase.TRAIN}),
}
"""Phases that may follow each phase. After a failed transition only `Colocation.restart` is allowed."""


class WrongPhase(RuntimeError):
    """A transition that the current phase does not allow."""


class SleepingEngines(Protocol):
    """All engines of a rollout at once; each method returns when all engines are done."""

    async def sleep(self) -> str | None:
        """Free the devices, whatever is awake; weights are lost. Returns the reason if no memory was freed."""
        ...

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Allocate memory for the weights (uninitialised), or for the KV cache and start serving."""
        ...


@final
class Colocation:
    """State machine for the phases of a run. `restart` and `open_colocation` begin in phase ``train``."""

    def __init__(self, ranks: Ranks | None, engines: SleepingEngines, budget: MemoryBudget) -> None:
        """Args: ``ranks``: those that share their devices with the engines, which are asleep now; ``None``: none do."""
        self._ranks, self._engines, self._budget = ranks, engines, budget
        self._phase: Phase | None = None
        self._awake = False
        self._parameters_on = True
        self._seconds: dict[str, float] = {}

    async def restart(self, start: Action) -> None:
        """Run ``start``, which starts a fully onloaded trainer, and enter phase ``train``.

        Colocated engines are put to sleep first, whatever the phase in which the old trainer was lost or a transition
        failed.
        """
        self._phase = None
        if self._awake:
            await self._sleep()
        await start()
        self._parameters_on = True
        await self._budget.enter(Phase.TRAIN)
        self._phase = Phase.TRAIN

    async def to_trainer(self) -> None:
        """Go from ``roll`` to ``train``: put the engines to sleep, then onload the whole trainer."""
        async with self._entering(Phase.TRAIN):
            if self._ranks is not None:
                await self._sleep()
                with self._timed("onload"):
                    await self._onload(self._ranks, PARTS)

    async def to_engines(self, sync: Action) -> None:
        """Go from ``train`` through ``sync`` to ``roll``. The callable sends the current weights to every engine."""
        async with self._entering(Phase.SYNC):
            if self._ranks is not None:
                with self._timed("offload"):
                    await self._ranks.offload(("gradients", "optimizer"))
                await self._wake("weights")
        await sync()
        async with self._entering(Phase.ROLL):
            if self._ranks is not None:
                with self._timed("offload"):
                    await self._offload(self._ranks, PARTS)
                await self._wake("kv_cache")
        self._budget.write()

    @asynccontextmanager
    async def with_parameters(self) -> AsyncIterator[None]:
        """Keep the trainer's parameters on its devices inside; where they are offloaded, onload them for the duration.

        Works in any phase and in transitions that wait for a restarted engine. One call at a time.
        """
        parameters: tuple[Part, ...] = ("parameters",)
        ranks = None if self._parameters_on else self._ranks
        try:
            if ranks is not None:
                await self._onload(ranks, parameters)
            yield
        finally:
            if ranks is not None:
                with suppress(TrainerLost):  # its restart begins with everything onloaded
                    await self._offload(ranks, parameters)

    def memory(self) -> dict[str, float]:
        """Metrics, see `MemoryBudget.metrics`."""
        return self._budget.metrics()

    def read_seconds(self) -> dict[str, float]:
        """Seconds of ``offload``, ``onload``, ``engines_sleep`` and ``engines_wake`` since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    async def _onload(self, ranks: Ranks, parts: Collection[Part]) -> None:
        await ranks.onload(parts)
        self._parameters_on = True

    async def _offload(self, ranks: Ranks, parts: Collection[Part]) -> None:
        """Offload ``parts``, parameters among them."""
        self._parameters_on = False
        await ranks.offload(parts)

    async def _sleep(self) -> None:
        with self._timed("engines_sleep"):
            self._budget.remark = await self._engines.sleep()
        self._awake = False

    async def _wake(self, part: Literal["weights", "kv_cache"]) -> None:
        self._awake = True  # set first: a failed wake may leave the engines partly awake
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
        with TIMELINE.phase(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began


async def _nothing() -> None:
    pass


def limits(sizes: Mapping[str, int], residual: int) -> Limits:
    """Most bytes that a rank may hold in each phase when colocated.

    Args:
        sizes: bytes of the trainer's parts on this rank.
        residual: bytes that either side may keep after sleep or offload: contexts, caches, communicators.
    """
    offloaded: dict[str, int] = dict.fromkeys(PARTS, 0)
    rest = {"other": residual, "communicators": residual}
    return {
        Phase.TRAIN: {**sizes, "engine": residual},
        Phase.SYNC: {**offloaded, "parameters": sizes["parameters"], **rest},
        Phase.ROLL: {**offloaded, **rest},
    }


async def open_colocation(
    settings: EngineConfig, run: RunConfig, trainer: Trainer, engines: SleepingEngines
) -> Colocation:
    """Open the `Colocation` of a run in phase ``train``. Colocated engines are already asleep.

    Args:
        settings: its ``colocated`` is as the placement decided.
    """
    sharing, residual = None, int(settings.residual_gib * GIB)
    allowed: list[Limits] = []
    if settings.colocated:
        sharing = trainer.ranks
        assert sharing is not None  # the placement has said so
        allowed = [limits(sizes, residual) for sizes in sharing.info.part_bytes]
    budget = MemoryBudget(trainer.ranks, allowed, Path(run.out) / "memory.json")
    colocation = Colocation(sharing, engines, budget)
    await colocation.restart(_nothing)
    return colocation
