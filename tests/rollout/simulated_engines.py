"""Simulated engines that play episodes of log-normal length, for tests of how many may play at once."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from megatron_fleet.rollout.concurrency import Concurrency
from megatron_fleet.rollout.engine_statistics import EngineStatistics

STEP_TOKENS = 50
"""Tokens that each running episode gets between two readings."""


@dataclass(slots=True)
class Episode:
    """``tokens`` that it will have, and ``context``: those that it has."""

    tokens: int
    context: int = 0


@dataclass(slots=True)
class Engine:
    """One engine: its KV cache holds ``kv`` tokens, and it runs ``sequences`` episodes; others wait."""

    kv: int
    sequences: int
    alive: bool = True
    running: list[Episode] = field(default_factory=list)
    waiting: list[Episode] = field(default_factory=list)
    preemptions: int = 0

    @property
    def used(self) -> int:
        return sum(episode.context for episode in self.running)

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def step(self) -> tuple[EngineStatistics, int]:
        """Play until the next reading; returns it, and how many episodes ended."""
        preempted = 0
        while self.waiting and len(self.running) < self.sequences:
            if self.used + self.waiting[0].context + STEP_TOKENS > self.kv and self.running:
                break
            self.running.append(self.waiting.pop(0))
        for episode in self.running:
            episode.context += STEP_TOKENS
        most = self.used / self.kv
        while self.used > self.kv and len(self.running) > 1:
            self.waiting.insert(0, self.running.pop())
            preempted += 1
        ended = [episode for episode in self.running if episode.context >= episode.tokens]
        use, running = self.used / self.kv, len(self.running)
        self.running = [episode for episode in self.running if episode.context < episode.tokens]
        self.preemptions += preempted
        counts = EngineStatistics(
            steps=int(running > 0), running=running, waiting=len(self.waiting), kv_usage=min(1.0, use),
            most_kv_usage=min(1.0, most), preemptions=preempted,
        )  # fmt: skip
        return counts, len(ended)


class Simulation:
    """Engines that play ``step`` episodes again and again, or without end (``None``).

    Attributes:
        use: mean KV cache use of the engines, at each reading.
        allowed: episodes that were allowed, at each reading.
        preemptions: of each reading.
    """

    def __init__(
        self, engines: int, kv: int, sequences: int, mean: float, sigma: float = 0.7, step: int | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.engines = [Engine(kv, sequences) for _ in range(engines)]
        self.concurrency = Concurrency(range(engines), sequences)
        self.mean, self.sigma, self.of_step = mean, sigma, step
        self.use: list[float] = []
        self.allowed: list[int] = []
        self.playing: list[int] = []
        self.preemptions: list[int] = []
        self.ended = 0
        self._random = random.Random(seed)
        self._wanted = 0

    @property
    def alive(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.alive]

    def lose(self, index: int) -> None:
        """Lose an engine; its episodes are played again from the start."""
        engine = self.engines[index]
        engine.alive = False
        self._wanted += engine.load
        engine.running, engine.waiting = [], []

    def play(self, readings: int) -> None:
        for _ in range(readings):
            playing = sum(engine.load for engine in self.engines)
            if self.of_step is not None and not playing and not self._wanted:
                self._wanted = self.of_step
            waiting = 10**6 if self.of_step is None else self._wanted
            for _ in range(min(waiting, self.concurrency.allowed - playing)):
                tokens = self.mean * self._random.lognormvariate(-(self.sigma**2) / 2, self.sigma)
                min(self.alive, key=lambda engine: engine.load).waiting.append(Episode(int(tokens)))
                self._wanted -= self.of_step is not None
                waiting -= 1
            readings_of = [engine.step() if engine.alive else (EngineStatistics(), 0) for engine in self.engines]
            ended = sum(one for _, one in readings_of)
            self.ended += ended
            playing = sum(engine.load for engine in self.engines)
            for index, (counts, _) in enumerate(readings_of):
                alive = self.engines[index].alive
                self.concurrency.observe(index, alive, counts, playing=playing, waiting=waiting, ended=ended)
                ended = 0
            self.use.append(sum(counts.kv_usage for counts, _ in readings_of) / len(self.alive))
            self.preemptions.append(sum(counts.preemptions for counts, _ in readings_of))
            self.allowed.append(self.concurrency.allowed)
            self.playing.append(playing)
