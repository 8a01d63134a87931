"""Discrete-event simulation of a run: many steps with long-tailed episodes, tools, failures and staleness.

Episodes play on engines that serve all of theirs at one speed, which falls with their number (`rollout.Engine`). As in
`loop.batches`, groups of episodes are a stream: as many play as the batch needs, and ``ahead`` batches more; a batch
takes those of its window that ended first; groups that still play continue, are restarted, or are waited for. Engines
are paused while weights are synced; colocated ones also while the trainer works; tool calls continue during a pause.
An episode that fails, or is older than ``staleness`` versions, is restarted with the same length, because lengths
depend on the task. An engine that is lost starts again, and its episodes elsewhere; a trainer that is lost repeats the
steps since its last checkpoint.

The only state that events do not change is how far episodes are; engines keep it as one number, the tokens that each of
their episodes has advanced, and episodes as the number at which they end. So events are few: a heap of times is enough,
and no library for processes is needed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

LATENCY_SIGMA = 1.0
"""Standard deviation of the logarithm of an episode's waiting for tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Parameters of a simulation.

    Attributes:
        engines, slots: engines, and episodes that each plays at once.
        token_s: episodes on an engine → seconds in which each of them advances by one sampled token.
        lengths: sampled tokens of episodes to draw from, ``[N]``, or of groups, ``[N, samples]``.
        waiting_s: mean seconds of an episode's tools, which `token_s` includes; what an episode waits longer delays it.
        waiting_sigma: standard deviation of the logarithm of that time.
        tool_left_s: mean remaining seconds of a tool call that is running at a random moment.
        episodes: of a step.
        samples: episodes of a group.
        trainer_s, sync_s: seconds of the trainer's work of a step, and of a weight sync.
        staleness: most weight versions between an episode's first token and its update.
        ahead: batches that play besides the one that is waited for; ``None``: ``staleness``.
        window: steps among which groups may change places; ``None``: any.
        unfinished: what becomes of groups that play when a batch is full.
        colocated: engines are paused while the trainer works.
        failures: share of episodes that fail and are played again.
        mtbf_hours: mean hours between two failures of one GPU; 0: none fails.
        gpus_of_engine, gpus_of_trainer: for the rate of failures.
        restart_s: seconds until a lost engine or trainer works again.
        checkpoint_interval: steps between checkpoints.
        contention: how many times slower trainer and engines are while both work, if they share processors; tools are
            not.
    """

    engines: int
    slots: int
    token_s: Callable[[int], float]
    lengths: np.ndarray
    waiting_s: float
    waiting_sigma: float = LATENCY_SIGMA
    tool_left_s: float = 0.0
    episodes: int
    trainer_s: float
    sync_s: float
    samples: int = 1
    staleness: int = 0
    ahead: float | None = None
    window: int | None = 1
    unfinished: Literal["continue", "again", "wait"] = "continue"
    colocated: bool = False
    failures: float = 0.02
    mtbf_hours: float = 0.0
    gpus_of_engine: int = 1
    gpus_of_trainer: int = 0
    restart_s: float = 300.0
    checkpoint_interval: int = 10
    contention: float = 1.0


@dataclass(slots=True, kw_only=True)
class Result:
    """Totals of a simulation.

    Attributes:
        seconds: of all steps.
        step_s: mean seconds of a step.
        trainer_busy: share of the time in which the trainer worked.
        engines_busy: mean share of engines that had an episode to play and could.
        slots_used: mean share of their slots.
        staleness: mean weight versions between an episode's start and its use.
        episodes: episodes that were trained on, those of repeated steps too.
        replayed: episodes that were played again.
        engine_losses, trainer_losses: failures.
    """

    seconds: float
    step_s: float
    trainer_busy: float
    engines_busy: float
    slots_used: float
    staleness: float
    episodes: int
    replayed: int
    engine_losses: int
    trainer_losses: int


@dataclass(slots=True, eq=False)
class _Group:
    """``lengths``: tokens and delay of each episode; ``versions``: of those that have ended, by place."""

    step: int
    lengths: list[tuple[float, float]]
    versions: dict[int, int] = field(default_factory=dict)
    dropped: bool = False

    @property
    def left(self) -> int:
        """Number of episodes that have not ended."""
        return len(self.lengths) - len(self.versions)

    @property
    def missing(self) -> list[int]:
        """Places of the episodes that have not ended."""
        return [place for place in range(len(self.lengths)) if place not in self.versions]


@dataclass(slots=True)
class _Episode:
    group: _Group
    place: int
    version: int = 0

    @property
    def tokens(self) -> float:
        return self.group.lengths[self.place][0]

    @property
    def delay(self) -> float:
        return self.group.lengths[self.place][1]


@dataclass(slots=True)
class _Engine:
    """``passed``: tokens that each episode advanced by ``at``; ``playing``: (where it ends, number, episode)."""

    playing: list[tuple[float, int, _Episode]] = field(default_factory=list)
    passed: float = 0.0
    at: float = 0.0
    timer: int = 0
    lost: bool = False


class Simulation:
    """A run; `play` plays it."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self._setup, self._random = setup, np.random.default_rng(seed)
        self._speed: dict[int, float] = {}
        self._waits = setup.waiting_s / float(np.mean(setup.lengths))  # seconds of tools for each token
        self._paused_at = 0.0
        self._engines = [_Engine() for _ in range(setup.engines)]
        self._queue: deque[_Episode] = deque()
        self._delayed: dict[int, _Episode] = {}
        self._active = self._playing = 0
        self._events: list[tuple[float, int, str, int, int]] = []
        self._number = itertools.count()
        self._now = 0.0
        self._size = max(1, setup.episodes // setup.samples)
        self._ahead = round(self._size * (setup.staleness if setup.ahead is None else setup.ahead))
        self._groups: list[_Group] = []  # not trained on yet, in their order
        self._drawn = self._done = self._version = 0
        self._saved = 0
        self._work_left = 0.0
        self._working_since: float | None = None
        self._training = self._syncing = self._trainer_lost = False
        self._trainer_timer = 0
        self._factor = 1.0
        self._busy = self._engine_s = self._slot_s = 0.0
        self._measured_at = 0.0
        self._counts = dict.fromkeys(("episodes", "replayed", "engines", "trainer"), 0)
        self._staleness = 0.0

    def play(self, steps: int) -> Result:
        """Play a number of steps."""
        s = self._setup
        if s.mtbf_hours:
            for index in range(s.engines):
                self._later(self._lifetime(s.gpus_of_engine), "engine lost", index)
            if s.gpus_of_trainer:
                self._later(self._lifetime(s.gpus_of_trainer), "trainer lost", 0)
        self._launch()
        while self._done < steps:
            time, _, what, index, timer = heapq.heappop(self._events)
            self._measure(time)
            self._now = time
            self._handle(what, index, timer)
        seconds = self._now
        return Result(
            seconds=seconds,
            step_s=seconds / steps,
            trainer_busy=self._busy / seconds,
            engines_busy=self._engine_s / seconds / s.engines,
            slots_used=self._slot_s / seconds / s.engines / s.slots,
            staleness=self._staleness / max(1, self._counts["episodes"]),
            episodes=self._counts["episodes"],
            replayed=self._counts["replayed"],
            engine_losses=self._counts["engines"],
            trainer_losses=self._counts["trainer"],
        )

    def _handle(self, what: str, index: int, timer: int) -> None:
        if what == "episode" and timer == self._engines[index].timer:
            self._finish(index)
        elif what == "delayed":
            if index in self._delayed:
                self._ended(self._delayed.pop(index))
        elif what == "trained" and timer == self._trainer_timer:
            self._trained()
        elif what == "synced" and timer == self._trainer_timer:
            self._synced()
        elif what == "engine lost":
            self._lose_engine(index)
        elif what == "engine back":
            self._engines[index].lost = False
            self._later(self._lifetime(self._setup.gpus_of_engine), "engine lost", index)
            self._fill()
        elif what == "trainer lost":
            self._lose_trainer()
        elif what == "trainer back":
            self._trainer_lost = False
            self._later(self._lifetime(self._setup.gpus_of_trainer), "trainer lost", 0)
            self._launch()
            self._train()

    # Episodes and engines.

    @property
    def _paused(self) -> bool:
        """Whether the engines are paused."""
        return self._syncing or (self._setup.colocated and self._training)

    def _launch(self) -> None:
        """Queue the groups that may play for the next batch."""
        while len(self._groups) < self._size + self._ahead:
            group = _Group(self._drawn // self._size, self._lengths())
            self._groups.append(group)
            self._queue += [_Episode(group, place) for place in group.missing]
            self._drawn += 1
        self._fill()

    def _lengths(self) -> list[tuple[float, float]]:
        """Draw tokens and delay of each episode of a group."""
        s, among = self._setup, len(self._setup.lengths)
        if s.lengths.ndim == 2:
            tokens = s.lengths[self._random.integers(among)].tolist()
        else:
            tokens = [float(s.lengths[self._random.integers(among)]) for _ in range(s.samples)]
        return [(max(1.0, each), self._delay()) for each in tokens]

    def _delay(self) -> float:
        s = self._setup
        if not s.waiting_s or not s.waiting_sigma:
            return 0.0
        waits = s.waiting_s * math.exp(self._random.normal(-(s.waiting_sigma**2) / 2, s.waiting_sigma))
        return max(0.0, waits - s.waiting_s)

    def _fill(self, among: Iterable[int] | None = None) -> None:
        """Give queued episodes to the engines with the fewest; ``None``: among all."""
        if self._paused or not self._queue:
            return
        slots, engines = self._setup.slots, self._engines
        indices = range(len(engines)) if among is None else among
        free = [
            (len(engines[i].playing), i) for i in indices if not engines[i].lost and len(engines[i].playing) < slots
        ]
        heapq.heapify(free)
        changed = set()
        while self._queue and free:
            episode = self._queue.popleft()
            count, index = heapq.heappop(free)
            engine = self._engines[index]
            if index not in changed:
                self._advance(engine)
                changed.add(index)
            episode.version = self._version
            heapq.heappush(engine.playing, (engine.passed + episode.tokens, next(self._number), episode))
            self._active += not count
            self._playing += 1
            if count + 1 < slots:
                heapq.heappush(free, (count + 1, index))
        for index in changed:
            self._plan(index)
        self._share()

    def _advance(self, engine: _Engine) -> None:
        """Bring an engine's progress up to now."""
        if engine.playing and not self._paused and not engine.lost:
            engine.passed += (self._now - engine.at) / self._token_s(len(engine.playing))
        engine.at = self._now

    def _token_s(self, episodes: int) -> float:
        """Seconds in which each episode advances by a token now. Tools are as fast while processors are shared."""
        alone = self._token_s_alone(episodes)
        return alone + (self._factor - 1) * max(0.0, alone - self._waits)

    def _token_s_alone(self, episodes: int) -> float:
        if episodes not in self._speed:
            self._speed[episodes] = self._setup.token_s(episodes)
        return self._speed[episodes]

    def _pause(self) -> None:
        """Pause the engines."""
        if not self._paused:
            for engine in self._engines:
                self._advance(engine)
            self._paused_at = self._now

    def _resume(self) -> None:
        """Resume the engines. Episodes that were waiting for a tool have progressed during the pause."""
        pause, left = self._now - self._paused_at, self._setup.tool_left_s
        waited = pause * left / (pause + left) if left else 0.0
        for engine in self._engines:
            engine.at = self._now
            if engine.playing and not engine.lost:
                alone = self._token_s_alone(len(engine.playing))
                engine.passed += min(1.0, self._waits / alone) * waited / alone

    def _plan(self, index: int) -> None:
        """Plan the end of an engine's next episode; an earlier plan no longer counts."""
        engine = self._engines[index]
        engine.timer += 1
        if engine.playing and not self._paused and not engine.lost:
            left = max(0.0, engine.playing[0][0] - engine.passed)
            self._later(left * self._token_s(len(engine.playing)), "episode", index, engine.timer)

    def _finish(self, index: int) -> None:
        engine = self._engines[index]
        self._advance(engine)
        _, _, episode = heapq.heappop(engine.playing)
        self._playing -= 1
        self._active -= not engine.playing
        self._plan(index)
        if episode.delay:
            number = next(self._number)
            self._delayed[number] = episode
            self._later(episode.delay, "delayed", number)
        else:
            self._ended(episode)
        self._fill([index])
        self._share()

    def _ended(self, episode: _Episode) -> None:
        group = episode.group
        if group.dropped:
            return  # its attempt was given up
        if self._random.random() < self._setup.failures:
            self._again(group, [episode.place])
            return
        group.versions[episode.place] = episode.version
        self._train()

    def _again(self, group: _Group, places: Sequence[int]) -> None:
        """Play episodes of a group again, first."""
        self._counts["replayed"] += len(places)
        self._queue.extendleft(_Episode(group, place) for place in places)
        self._fill()

    def _lose_engine(self, index: int) -> None:
        engine = self._engines[index]
        self._counts["engines"] += 1
        again = [_Episode(episode.group, episode.place) for _, _, episode in engine.playing]
        self._counts["replayed"] += len(again)
        self._clear(engine)
        engine.lost = True
        engine.timer += 1
        self._queue.extendleft(again)
        self._later(self._setup.restart_s, "engine back", index)
        self._fill()

    def _clear(self, engine: _Engine) -> None:
        """Give up an engine's episodes."""
        self._playing -= len(engine.playing)
        self._active -= bool(engine.playing)
        engine.playing.clear()

    # The trainer.

    def _train(self) -> None:
        """Begin the next step if its groups have ended and the trainer is free."""
        if self._training or self._syncing or self._trainer_lost:
            return
        chosen = self._choose()
        if len(chosen) < self._size:
            return
        if self._setup.unfinished == "wait" and any(group.left for group in self._groups):
            return
        self._groups = [group for group in self._groups if group not in chosen]
        for group in chosen:
            self._staleness += sum(self._version - version for version in group.versions.values())
            self._counts["episodes"] += len(group.versions)
        if self._setup.colocated:
            self._pause()
        self._training = True
        if self._setup.unfinished == "again":
            self._stop()
        elif self._setup.window is None and self._setup.staleness and self._setup.unfinished == "continue":
            self._launch()
        self._work_left = self._setup.trainer_s
        self._working_since = self._now
        for index in range(len(self._engines)):
            self._plan(index)
        self._share()
        self._plan_trainer()

    def _choose(self) -> list[_Group]:
        """The first groups of the window that have ended; episodes that are too old are played again."""
        s = self._setup
        last = None if s.window is None else (self._done // s.window + 1) * s.window
        eligible = [group for group in self._groups if last is None or group.step < last]
        for group in eligible:
            if not group.left and self._version > s.staleness and (old := self._too_old(group, self._version)):
                for place in old:
                    del group.versions[place]
                self._again(group, old)
        return [group for group in eligible if not group.left][: self._size]

    def _too_old(self, group: _Group, version: int) -> list[int]:
        """Places of the episodes that are too old for an update of ``version``."""
        return [place for place, v in group.versions.items() if version - v > self._setup.staleness]

    def _stop(self) -> None:
        """Give up the episodes in play; their groups are played again, but for what has ended and is not too old."""
        for engine in self._engines:
            self._clear(engine)
        self._queue.clear()
        for place, group in enumerate(self._groups):
            if group.left:
                old = self._too_old(group, self._version + 1)
                kept = {at: version for at, version in group.versions.items() if at not in old}
                group.dropped = True
                again = self._groups[place] = _Group(group.step, group.lengths, kept)
                self._counts["replayed"] += again.left
                self._queue += [_Episode(again, at) for at in again.missing]

    def _plan_trainer(self) -> None:
        self._trainer_timer += 1
        if self._training:
            self._later(self._work_left * self._factor, "trained", 0, self._trainer_timer)

    def _trained(self) -> None:
        self._pause()
        self._training, self._syncing = False, True
        for index in range(len(self._engines)):
            self._plan(index)
        self._trainer_timer += 1
        self._later(self._setup.sync_s, "synced", 0, self._trainer_timer)

    def _synced(self) -> None:
        self._resume()
        self._syncing = False
        self._version += 1
        self._done += 1
        if self._done % self._setup.checkpoint_interval == 0:
            self._saved = self._done
        for index in range(len(self._engines)):
            self._plan(index)
        self._share()
        self._launch()
        self._train()

    def _lose_trainer(self) -> None:
        """Go back to the last checkpoint; the steps since are played again."""
        self._counts["trainer"] += 1
        for engine in self._engines:
            self._advance(engine)
            self._clear(engine)
        self._syncing = self._training = False
        self._trainer_lost = True
        self._trainer_timer += 1
        self._queue.clear()
        for group in self._groups:
            group.dropped = True
        self._groups.clear()
        self._delayed = {}
        self._done, self._drawn = self._saved, self._saved * self._size
        for index in range(len(self._engines)):
            self._plan(index)
        self._later(self._setup.restart_s, "trainer back", 0)

    def _share(self) -> None:
        """Slow down what shares processors, from now on."""
        if self._setup.contention == 1.0:
            return
        both = self._training and self._active and not self._setup.colocated
        factor = self._setup.contention if both else 1.0
        if factor == self._factor:
            return
        for engine in self._engines:
            self._advance(engine)
        if self._training and self._working_since is not None:
            self._work_left -= (self._now - self._working_since) / self._factor
            self._working_since = self._now
        self._factor = factor
        for index in range(len(self._engines)):
            self._plan(index)
        if self._training:
            self._plan_trainer()

    def _measure(self, until: float) -> None:
        """Count the time until the next event."""
        span = until - self._measured_at
        self._measured_at = until
        if self._training or self._syncing:
            self._busy += span
        if not self._syncing:
            self._engine_s += span * self._active
            self._slot_s += span * self._playing

    def _lifetime(self, gpus: int) -> float:
        return float(self._random.exponential(3600 * self._setup.mtbf_hours / gpus))

    def _later(self, seconds: float, what: str, index: int, timer: int = 0) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._number), what, index, timer))
