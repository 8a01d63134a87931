"""Episodes in flight: how many the workers may have, and which of those that wait come first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron_fleet.agents.trajectory import Trajectory
from megatron_fleet.config.schema import EnvConfig, RolloutConfig
from megatron_fleet.data.task import Task
from megatron_fleet.rollout.concurrency import Concurrency
from megatron_fleet.rollout.monitor import EngineReading

RECENT = 64
"""Episodes of a task or an environment that its mean length is about; a policy's lengths change as it learns."""


class Flight:
    """Bound of the episodes in flight, which follows the engines' load with ``rollout.episodes_in_flight=auto``.

    Attributes:
        places: most episodes that workers ever have, those included that start their environments ahead of a place.
    """

    def __init__(
        self, rollout: RolloutConfig, env: EnvConfig, engines: Sequence[str], evaluation: bool = False
    ) -> None:
        """
        Args:
            engines: their names; none, unless some may be added: an endpoint plays.
            evaluation: they are evaluation engines.
        """
        endpoint = not engines and not rollout.engine.elastic
        self._most = rollout.most_evaluated(len(engines)) if evaluation else rollout.most_in_flight(endpoint)
        self._lookahead = env.provisioning.lookahead
        self.places = self._most + self._lookahead
        sequences = rollout.engine.sequences(rollout.episodes_in_flight)
        self._concurrency = Concurrency(engines, sequences) if rollout.adapts and not endpoint else None
        self._ended = 0
        self._lengths: dict[tuple[str, str], _Mean] = {}
        self._in_flight: list[int] = []

    @property
    def allowed(self) -> int:
        """Episodes that may play now."""
        return self._most if self._concurrency is None else min(self._most, self._concurrency.allowed)

    @property
    def limit(self) -> int | None:
        """Episodes that workers may have now; ``None``: as many as they have places."""
        return None if self._concurrency is None else self.allowed + self._lookahead

    def add(self, engine: str) -> None:
        """Count an engine from now on."""
        if self._concurrency is not None:
            self._concurrency.add(engine)

    def remove(self, engine: str) -> None:
        """Do not count an engine any more."""
        if self._concurrency is not None:
            self._concurrency.remove(engine)

    def read(self, reading: EngineReading, in_flight: int, waiting: int) -> None:
        """Take an engine's newest reading.

        Args:
            in_flight, waiting: episodes that workers have, and that wait for a worker.
        """
        if in_flight:
            self._in_flight.append(in_flight)
        if self._concurrency is not None:
            playing = max(0, in_flight - self._lookahead)
            self._concurrency.observe(
                reading.name, reading.serving, reading.counts, playing=playing, waiting=waiting, ended=self._ended
            )
        self._ended = 0

    def returned(self, trajectory: Trajectory) -> None:
        """Count an attempt that was in an engine, and the length of one that was played to its end."""
        self._ended += len(trajectory.token_ids) > 0
        if trajectory.reward is not None:
            for task in (trajectory.task_key, ""):
                self._lengths.setdefault((trajectory.env_key, task), _Mean()).add(len(trajectory.token_ids))

    def expected_tokens(self, tasks: Sequence[Task]) -> float:
        """Return the mean length of the episodes that ``tasks`` had, or else their environments; infinite if none had
        any."""
        known = (self._lengths.get((task.env_key, task.key)) or self._lengths.get((task.env_key, "")) for task in tasks)
        return fmean(math.inf if mean is None else mean.value for mean in known)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        in_flight, self._in_flight = self._in_flight, []
        found = {"engine/episodes_allowed": float(self.allowed)}
        return found | ({"engine/episodes_in_flight_mean": fmean(in_flight)} if in_flight else {})


@dataclass(slots=True)
class _Mean:
    """Mean of about the newest ``RECENT`` values."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count = min(RECENT, self.count + 1)
        self.value += (value - self.value) / self.count
