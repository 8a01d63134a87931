"""Who has the devices: the trainer, or the engines that sit on them too. One object owns the phase.

A cycle is *train → publish → roll*::

    train    the trainer has everything on its device; the engines sleep
    publish  of the trainer the parameters; of the engines memory for weights, which they receive
    roll     nothing of the trainer; the engines wholly awake

What leaves goes before what comes: engines sleep before the trainer returns, gradients and optimizer states go before
the engines' weights wake, the parameters before the KV cache does, on all ranks each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, final

from megatron_fleet.config.schema import Config
from megatron_fleet.loop.exchange import Exchange
from megatron_fleet.loop.memory_budget import GIB, Ledger, Limits, open_gauge
from megatron_fleet.platform.communicator import Communicator, together
from megatron_fleet.platform.device import device
from megatron_fleet.rollout.service import RolloutService
from megatron_fleet.trainer.megatron.offload import PARTS, Part
from megatron_fleet.trainer.megatron.policy import MegatronPolicy


class Phase(StrEnum):
    """See the module."""

    TRAIN = "train"
    PUBLISH = "publish"
    ROLL = "roll"


FOLLOWS: Mapping[Phase, frozenset[Phase]] = {
    Phase.TRAIN: frozenset({Phase.PUBLISH}),
    Phase.PUBLISH: frozenset({Phase.ROLL}),
    Phase.ROLL: frozenset({Phase.TRAIN}),
}
"""What may come after a phase. After a change that failed, nothing may."""


class WrongPhase(RuntimeError):
    """An order that the present phase does not allow."""


@dataclass(frozen=True, slots=True)
class Slept:
    """``lost_weights``: they must be published before the engines serve again. ``kept_memory``: why no memory was
    freed, ``None`` when it was."""

    lost_weights: bool
    kept_memory: str | None


class Trainer(Protocol):
    """One rank's state; see `policy.megatron.offload.TrainState`."""

    def held(self) -> Mapping[str, int]: ...

    def offload(self, parts: Collection[Part]) -> None: ...

    def onload(self, parts: Collection[Part]) -> None: ...


class Engines(Protocol):
    """All engines at once. Collective; returns, on every rank, when all engines are done."""

    def sleep(self) -> Slept:
        """Leave the devices."""
        ...

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take memory for the weights (uninitialised), or for the KV cache and serve."""
        ...


@final
class Devices:
    """Begins in phase ``train``. Every rank calls every method, in the same order."""

    def __init__(self, trainer: Trainer, engines: Engines, ledger: Ledger, comm: Communicator) -> None:
        self._trainer, self._engines, self._ledger, self._comm = trainer, engines, ledger, comm
        self._phase: Phase | None = Phase.TRAIN
        self._lost_weights = True
        self._seconds: dict[str, float] = {}
        ledger.enter(Phase.TRAIN, trainer.held())

    def to_trainer(self) -> None:
        """From ``roll`` to ``train``: the engines sleep, then everything of the trainer comes."""
        with self._entering(Phase.TRAIN):
            with self._timed("engines_sleep"):
                slept = self._engines.sleep()
            self._lost_weights, self._ledger.remark = slept.lost_weights, slept.kept_memory
            with self._timed("onload"), together(self._comm):
                self._trainer.onload(PARTS)

    def to_engines(self, publish: Callable[[], None]) -> None:
        """From ``train`` over ``publish`` to ``roll``; ``publish`` puts the present weights on every engine."""
        with self._entering(Phase.PUBLISH):
            with self._timed("offload"), together(self._comm):
                self._trainer.offload(("gradients", "optimizer"))
            with self._timed("engines_wake"):
                self._engines.wake("weights")
        publish()
        with self._entering(Phase.ROLL):
            with self._timed("offload"), together(self._comm):
                self._trainer.offload(PARTS)
            with self._timed("engines_wake"):
                self._engines.wake("kv_cache")
        self._ledger.write()

    @contextmanager
    def borrowed(self, publish: Callable[[], None]) -> Iterator[None]:
        """Inside ``train``, afterwards ``roll`` again; ``publish`` repeats the weights for engines that lost them."""
        self.to_trainer()
        yield
        self.to_engines(publish if self._lost_weights else _nothing)

    def memory(self) -> dict[str, float]:
        """Metrics, see `Ledger.metrics`."""
        return self._ledger.metrics()

    def read_seconds(self) -> dict[str, float]:
        """Seconds of ``offload``, ``onload``, ``engines_sleep`` and ``engines_wake`` since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    @contextmanager
    def _entering(self, phase: Phase) -> Iterator[None]:
        if self._phase is None or phase not in FOLLOWS[self._phase]:
            now = "after a change of phase that failed" if self._phase is None else f"in phase {self._phase.value!r}"
            raise WrongPhase(f"phase {phase.value!r} cannot begin {now}")
        self._ledger.leave(quiet=self._phase is Phase.TRAIN)
        self._phase = None
        yield
        self._ledger.enter(phase, self._trainer.held())
        self._phase = phase

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began


def _nothing() -> None:
    pass


class SleepingEngines:
    """Engines of a rollout on the trainer's devices; rank 0 asks for all."""

    def __init__(self, ranks: Exchange, rollout: RolloutService | None) -> None:
        """Args: ``rollout``: on rank 0; ``None`` elsewhere."""
        self._ranks, self._rollout = ranks, rollout

    def sleep(self) -> Slept:
        """See `Engines.sleep`."""
        return Slept(lost_weights=True, kept_memory=self._ranks.share(self._rollout.sleep if self._rollout else None))

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See `Engines.wake`."""
        self._ranks.share(self._rollout.wake if self._rollout else None, part)


class EnginesApart:
    """Engines that need nothing of the trainer's devices."""

    def sleep(self) -> Slept:
        """They go on."""
        return Slept(lost_weights=False, kept_memory="they do not share the trainer's devices")

    def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """They are awake."""


class TrainerStays:
    """A trainer whose devices nobody else needs; its tensors are not counted one by one."""

    def held(self) -> Mapping[str, int]:
        """Nothing that could leave."""
        return {}

    def offload(self, parts: Collection[Part]) -> None:
        """It stays."""

    def onload(self, parts: Collection[Part]) -> None:
        """It is there."""


def limits(sizes: Mapping[str, int], residual: int) -> Limits:
    """What each phase may hold when trainer and engines share devices.

    Args:
        sizes: bytes of the trainer's parts on this rank.
        residual: bytes that a side may leave behind: contexts, caches, communicators.
    """
    away: dict[str, int] = dict.fromkeys(PARTS, 0)
    return {
        Phase.TRAIN: {**sizes, "engine": residual},
        Phase.PUBLISH: {**away, "parameters": sizes["parameters"], "other": residual, "communicators": residual},
        Phase.ROLL: {**away, "other": residual, "communicators": residual},
    }


def open_devices(
    config: Config, policy: MegatronPolicy, rollout: RolloutService | None, ranks: Exchange, comm: Communicator
) -> Devices:
    """The devices of a run, in phase ``train``; collective. Engines that share them sleep already.

    Args:
        rollout: on rank 0; ``None`` elsewhere.

    Raises:
        UserError: the trainer's parameters cannot leave their device.
    """
    gauge, path = open_gauge(device()), Path(config.run.out) / "memory.json"
    if not config.rollout.engine.colocated:
        return Devices(TrainerStays(), EnginesApart(), Ledger(comm, gauge, {}, path), comm)
    state = policy.train_state()
    allowed = limits(state.sizes(), int(config.rollout.engine.residual_gib * GIB))
    return Devices(state, SleepingEngines(ranks, rollout), Ledger(comm, gauge, allowed, path), comm)
