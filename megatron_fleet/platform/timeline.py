"""Timeline of this process: the phases that are under way, and slices of time of all components for traces.

Like logging, it has one instance, `TIMELINE`: whoever waits for something notes it there. `mfleet top`, the watchdog
and the traces of a run are made of it. Phases cost microseconds; slices are dropped unless the step is traced.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

MAX_EVENTS = 100_000
"""Slices and samples that one trace may have; those beyond are counted only."""
HISTORY = 32
"""Newest durations kept of each phase."""
CONTROLLER = "controller"

NOTHING: Mapping[str, Any] = MappingProxyType({})
Part = tuple[str, float, float]
"""Name, unix time at which it began, and seconds."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """One of the things that a phase waits for, such as a group of episodes.

    Attributes:
        kind: what it belongs to, such as its environment.
        began: unix time.
        done, total: units of its work.
    """

    name: str
    kind: str
    began: float
    done: int
    total: int


@dataclass(slots=True, eq=False)
class Phase:
    """Something that the controller waits for.

    Attributes:
        began: unix time.
        since: the same moment on the monotonic clock.
        seconds: its duration; ``None`` while it runs.
        done, total: units of work; ``total`` is 0 where they cannot be counted.
        step: training steps that were finished when it began.
        awaited: what it waits for now, the longest first, as far as it is known.
    """

    name: str
    began: float
    since: float
    step: int
    seconds: float | None = None
    done: int = 0
    total: int = 0
    awaited: Sequence[Awaited] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of time of one component.

    Attributes:
        group, lane: kind of the component and its name; an empty lane: wherever there is room.
        parts: stretches within it, in order.
        arguments: numbers and texts that describe it.
    """

    group: str
    lane: str
    name: str
    began: float
    seconds: float
    parts: Sequence[Part] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one component at a moment."""

    group: str
    lane: str
    time: float
    values: Mapping[str, float]


@dataclass(slots=True)
class StepEvents:
    """Events of one training step, ``step`` counted from 1. ``dropped``: number of those beyond `MAX_EVENTS`."""

    step: int
    slices: list[Slice] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    dropped: int = 0

    @property
    def full(self) -> bool:
        return len(self.slices) + len(self.samples) >= MAX_EVENTS


class Timeline:
    """Phases and events of the current step. Read by other threads; written by any.

    Attributes:
        trace_every: number of steps from one traced step to the next; 0: none is. The first step after a start, with
            the start itself, is traced besides.
        step: training steps that are finished.
        step_began: unix time at which the current step began; ``None`` before the first one.
        phases: of the current step, in the order in which they began.
        traced: events of finished steps that nobody has taken yet.
    """

    def __init__(self) -> None:
        self._history: dict[str, deque[float]] = {}
        self.reset(0)

    def reset(self, trace_every: int) -> None:
        """Begin anew, as with a new process."""
        self.trace_every = trace_every
        self.step = 0
        self.step_began: float | None = None
        self.phases: list[Phase] = []
        self.traced: deque[StepEvents] = deque(maxlen=2)
        self._history.clear()
        self._events: StepEvents | None = StepEvents(1) if trace_every else None

    @property
    def tracing(self) -> bool:
        """Whether the current step is traced."""
        return self._events is not None

    def begin_step(self, step: int) -> None:
        """Note that the step after ``step`` finished ones begins."""
        first = self.step_began is None
        if not first:
            self.end_step()
            due = self.trace_every and (step + 1) % self.trace_every == 0
            self._events = StepEvents(step + 1) if due else None
        elif self._events is not None:
            self._events.step = step + 1
        self.step, self.step_began = step, time.time()
        self.phases = [phase for phase in self.phases if phase.seconds is None]

    def finish(self, step: int) -> None:
        """Note that the run is over, after ``step`` steps."""
        self.end_step()
        self.step, self.step_began, self.phases = step, None, []

    def end_step(self) -> None:
        """Note that the current step is over."""
        if self._events is not None and self.step_began is not None:
            name = f"step {self._events.step}"
            self.add(CONTROLLER, "", name, self.step_began, time.time() - self.step_began)
            self.traced.append(self._events)
        self._events = None

    @contextmanager
    def phase(self, name: str, total: int = 0) -> Iterator[Phase]:
        """Note the phase of the controller that the block is."""
        phase = Phase(name, time.time(), time.monotonic(), self.step, total=total)
        self.phases.append(phase)
        try:
            yield phase
            history = self._history.setdefault(name, deque(maxlen=HISTORY))
            history.append(time.monotonic() - phase.since)
        finally:
            phase.seconds = time.monotonic() - phase.since
            self.add(CONTROLLER, "", name, phase.began, phase.seconds)

    def history(self, name: str) -> list[float]:
        """Return the durations of the newest phases of this name that succeeded."""
        return list(self._history.get(name, ()))

    def add(
        self,
        group: str,
        lane: str,
        name: str,
        began: float,
        seconds: float,
        parts: Sequence[Part] = (),
        arguments: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Add a `Slice` if the current step is traced."""
        if (events := self._room()) is not None:
            events.slices.append(Slice(group, lane, name, began, seconds, parts, arguments))

    def sample(self, group: str, lane: str, values: Mapping[str, float]) -> None:
        """Add a `Sample` if the current step is traced."""
        if (events := self._room()) is not None:
            events.samples.append(Sample(group, lane, time.time(), values))

    def _room(self) -> StepEvents | None:
        events = self._events
        if events is not None and events.full:
            events.dropped += 1
            return None
        return events


TIMELINE = Timeline()
"""The timeline of this process."""


@dataclass
class Clock:
    """Durations of the phases of one step, in seconds."""

    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the duration of the block, which is a phase of the timeline."""
        began = time.monotonic()
        with TIMELINE.phase(name):
            yield
        self.seconds[name] = time.monotonic() - began

    def read(self) -> dict[str, float]:
        """Return the seconds of the phases so far, and as ``step`` those since the clock's start."""
        return {**self.seconds, "step": time.monotonic() - self.began}
