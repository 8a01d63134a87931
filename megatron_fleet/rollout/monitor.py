"""Present state of a rollout: load of its engines and episodes that returned, for those who look at a live run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.rollout.engine_statistics import EngineStatistics

if TYPE_CHECKING:
    from megatron_fleet.rollout.engine_slot import EngineSlot

SAMPLE_INTERVAL_S = 2.0


@dataclass(slots=True)
class EngineReading:
    """What one engine counted in the last ``seconds``."""

    name: str
    serving: bool = False
    counts: EngineStatistics = field(default_factory=EngineStatistics)
    seconds: float = SAMPLE_INTERVAL_S

    @property
    def requests(self) -> float:
        """Mean number of requests that the engine had, those that waited included."""
        return (self.counts.running + self.counts.waiting) / (self.counts.steps or 1)


@dataclass(slots=True)
class EnvironmentTally:
    """Attempts at episodes of one environment that returned since the step began.

    Attributes:
        known: those with a reward; ``rewards``: sum of these.
        quarantined: those that were not played.
    """

    episodes: int = 0
    known: int = 0
    rewards: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What a rollout does now.

    Attributes:
        engines: those of the rollout, then those that play evaluations only.
        playing, waiting: episodes that workers have for the rollout's engines, and that wait for a worker.
        allowed: episodes that may play now; ``None``: the number does not follow the engines' load.
    """

    engines: Sequence[EngineReading]
    environments: Mapping[str, EnvironmentTally]
    playing: int
    waiting: int
    allowed: int | None = None


@final
class RolloutMonitor:
    """Collects readings of engines and tallies of episodes."""

    def __init__(
        self, slots: Sequence[EngineSlot], on_reading: Callable[[EngineReading], None] = lambda _: None
    ) -> None:
        """Args: ``on_reading``: called with each reading of an engine."""
        self._on_reading = on_reading
        self._readings = {slot.name: EngineReading(slot.name) for slot in slots}
        self._slots = list(slots)
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._step = TIMELINE.step
        self._environments: dict[str, EnvironmentTally] = {}

    @property
    def engines(self) -> list[EngineReading]:
        """The newest reading of each engine, in the order in which they were added."""
        return list(self._readings.values())

    def add(self, slot: EngineSlot) -> None:
        """Read a further engine, within `watch`."""
        self._readings[slot.name] = EngineReading(slot.name)
        self._watching[slot.name] = asyncio.create_task(self._watch(slot))

    def remove(self, slot: EngineSlot) -> None:
        """Do not read an engine any more."""
        self._readings.pop(slot.name, None)
        if (watching := self._watching.pop(slot.name, None)) is not None:
            watching.cancel()

    def environments(self) -> dict[str, EnvironmentTally]:
        """Return the tallies of the current step by environment, in alphabetical order."""
        return dict(sorted(self._environments.items())) if self._step == TIMELINE.step else {}

    def returned(self, worker: str, trajectory: Trajectory) -> None:
        """Count an attempt that a worker returned, and note it on the timeline."""
        if self._step != TIMELINE.step:
            self._step, self._environments = TIMELINE.step, {}
        tally, metrics = self._environments.setdefault(trajectory.env_key, EnvironmentTally()), trajectory.metrics
        tally.episodes += 1
        if trajectory.reward is not None:
            tally.known += 1
            tally.rewards += trajectory.reward
        tally.tool_calls += int(metrics.get("tool_calls", 0))
        tally.tool_errors += int(metrics.get("tool_errors", 0))
        tally.quarantined += "quarantined" in metrics
        if TIMELINE.tracing and trajectory.stretches:
            (_, began, seconds), *parts = trajectory.stretches
            about: dict[str, Any] = {
                name: value for name, value in metrics.items() if name in ("turns", "action_tokens")
            }
            about |= {"environment": trajectory.env_key, "outcome": trajectory.outcome, "reward": trajectory.reward}
            TIMELINE.add(worker, "", trajectory.task_key, began, seconds, parts, about)

    async def watch(self) -> None:
        """Read the engines every ``SAMPLE_INTERVAL_S`` until cancelled; one that does not answer keeps its reading."""
        for slot in self._slots:
            self.add(slot)
        try:
            await asyncio.Event().wait()
        finally:
            for watching in self._watching.values():
                watching.cancel()

    async def _watch(self, slot: EngineSlot) -> None:
        since = time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            counts = await slot.sample()
            now = time.monotonic()
            reading = self._readings[slot.name] = EngineReading(slot.name, slot.is_serving, counts, now - since)
            since = now
            steps = counts.steps or 1
            values = {"running": counts.running / steps, "waiting": counts.waiting / steps}
            TIMELINE.sample("engines", slot.name, values | {"kv_cache": counts.kv_usage / steps})
            self._on_reading(reading)
