"""Watchdog: stacks of every process of the run when a phase takes much longer than it did before."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from megatron_fleet.platform.alerts import alert
from megatron_fleet.platform.timeline import Phase, Timeline
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.telemetry.console import duration

log = logging.getLogger(__name__)

FEWEST = 3
"""Durations of a phase that are a history."""
FLOOR_S = 60.0
"""Seconds below which no phase is a stall."""
UNKNOWN_S = 1800.0
"""Seconds from which on a phase without a history is a stall."""
MAX_FILES = 8
"""Number of newest files with stacks that are kept."""


@final
class Watchdog:
    """Looks at the phases of a timeline. Nothing is ended: training goes on when the phase does."""

    def __init__(
        self, timeline: Timeline, folder: Path, factor: float, stacks: Callable[[], Mapping[str, str]]
    ) -> None:
        """
        Args:
            folder: existing folder of the files.
            factor: a phase stalls when it takes this many times as long as the longest of the last ones.
            stacks: returns the stacks of the run's processes, by host.
        """
        self._timeline, self._folder, self._factor, self._stacks = timeline, folder, factor, stacks
        self._stalled: list[Phase] = []
        self._told: Phase | None = None

    def look(self) -> None:
        """Write stacks and raise an alert if a phase stalls; once for each, and for those around it."""
        told = self._told
        if told is not None and told.seconds is not None:
            log.warning("step %d: %s ended after %s", told.step + 1, told.name, duration(told.seconds))
            self._told = None
        self._stalled = [phase for phase in self._stalled if phase.seconds is None]
        now = time.monotonic()
        running = [phase for phase in list(self._timeline.phases) if phase.seconds is None]
        late = [
            phase
            for phase in running
            if phase not in self._stalled and now - phase.since > self.limit_s(self._timeline.history(phase.name))
        ]
        if not late:
            return
        self._stalled += [phase for phase in running if phase not in self._stalled]
        self._told = late[-1]  # the innermost
        self._report(self._told, now - self._told.since)

    def limit_s(self, history: list[float]) -> float:
        """Return the seconds from which on a phase with these durations is a stall."""
        usual = self._factor * max(history, default=0.0)
        return max(FLOOR_S if len(history) >= FEWEST else UNKNOWN_S, usual)

    def _report(self, phase: Phase, seconds: float) -> None:
        history = self._timeline.history(phase.name)
        before = (
            f"at most {duration(max(history))} in the last {len(history)} times (logging.alerts.stall={self._factor:g})"
            if history
            else "and has never ended before"
        )
        what = f"step {phase.step + 1}: {phase.name} has taken {duration(seconds)} so far, {before}"
        path = self._folder / f"stall-{time.strftime('%Y%m%dT%H%M%S')}-{re.sub(r'[^0-9A-Za-z]+', '-', phase.name)}.txt"
        try:
            found = self._stacks()
            text = f"{what}\n\n" + "\n".join(f"=== host {host}\n{text}" for host, text in found.items())
            write_atomically(path, text.encode(errors="replace"))
            for old in sorted(self._folder.glob("stall-*.txt"))[:-MAX_FILES]:
                old.unlink()
            where = f"the stacks of its processes are in {path}"
        except OSError as error:
            where = f"its stacks could not be written ({error})"
        alert(log, "stall", f"{what}; training continues when it ends; {where}.", phase.name)
