"""What others see of a live run: ``status.json``, traces of its steps, and stacks when it stalls.

A thread of its own looks every second, so that a controller that hangs is noticed too. Nothing that fails here ends the
run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Protocol, final

import psutil

from megatron_fleet.cluster.janitor import marked
from megatron_fleet.cluster.joined_nodes import STACKS_S, Nodes
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import LoggingConfig, RunConfig
from megatron_fleet.loop.stopping import Stopped
from megatron_fleet.loop.watchdog import Watchdog
from megatron_fleet.platform.alerts import listening
from megatron_fleet.platform.processes import run_processes, stacks
from megatron_fleet.platform.timeline import TIMELINE, Phase
from megatron_fleet.platform.waiting import task_stacks
from megatron_fleet.rollout.monitor import EngineReading, EnvironmentTally, Load
from megatron_fleet.telemetry.status import (
    INTERVAL_S,
    MAX_ALERTS,
    Alert,
    AwaitedStatus,
    EngineStatus,
    EnvironmentStatus,
    PhaseStatus,
    RunStatus,
    State,
)
from megatron_fleet.telemetry.trace import FOLDER, write_trace

log = logging.getLogger(__name__)

MEMORY_INTERVAL_S = 5.0
MAX_PHASES = 100
"""Newest phases that the status has, of a step with very many."""


class LiveRollout(Protocol):
    """The part of `rollout.service.RolloutService` that is used."""

    @property
    def run_id(self) -> str: ...

    def live(self) -> Load: ...


class LiveRanks(Protocol):
    """The part of `trainer.base.Ranks` that is used."""

    @property
    def processes(self) -> list[tuple[str, int]]: ...


@final
class LiveRun:
    """A run, as long as the context lasts, in its folder ``run.out``, which exists.

    Attributes:
        ranks, rollout: set once they are there.
        nodes: other hosts, if there are any.
    """

    def __init__(self, run: RunConfig, settings: LoggingConfig, started: float) -> None:
        """Args: ``started``: unix time at which this attempt began."""
        self.ranks: LiveRanks | None = None
        self.rollout: LiveRollout | None = None
        self.nodes: Nodes | None = None
        self._run, self._settings, self._started = run, settings, started
        self._out = Path(run.out)
        self._alerts = _Kept()
        self._memory = _Memory()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = threading.Event()
        self._failures: set[str] = set()
        self._cleanup = ExitStack()
        self._watchdog: Watchdog | None = None

    def __enter__(self) -> LiveRun:
        settings, logs = self._settings, self._out / "logs"
        TIMELINE.reset(settings.trace_every)
        self._loop = asyncio.get_running_loop()
        self._cleanup.enter_context(listening(self._alerts))
        if settings.alerts.stall is not None:
            logs.mkdir(exist_ok=True)
            self._watchdog = Watchdog(TIMELINE, logs, settings.alerts.stall, self._stacks)
        self._thread = threading.Thread(target=self._watch, name="live", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        TIMELINE.end_step()
        state: State = "finished" if error is None else "failed"
        if isinstance(error, Stopped | asyncio.CancelledError | KeyboardInterrupt):
            state = "stopped"
        self.rollout = None
        self._try(self._traces)
        self._try(lambda: self.status(state).write(self._out))
        self._cleanup.close()

    def status(self, state: State = "running") -> RunStatus:
        """Return the present state."""
        run, load = self._run, Load([], {}, 0, 0) if self.rollout is None else self.rollout.live()
        phases = list(TIMELINE.phases)[-MAX_PHASES:]
        return RunStatus(
            name=run.name,
            id=run.id or "",
            state=state,
            host=socket.gethostname(),
            pid=os.getpid(),
            time=time.time(),
            started=self._started,
            step=TIMELINE.step,
            steps=run.steps or 0,
            step_began=TIMELINE.step_began,
            phases=[_phase(phase) for phase in phases],
            engines=[_engine(reading) for reading in load.engines],
            environments={name: _environment(tally) for name, tally in load.environments.items()},
            playing=load.playing,
            waiting=load.waiting,
            allowed=load.allowed,
            memory=self._memory.read(),
            alerts=list(self._alerts.newest),
        )

    def _watch(self) -> None:
        while True:
            self._try(lambda: self.status().write(self._out))
            self._try(self._traces)
            if self._watchdog is not None:
                self._try(self._watchdog.look)
            if self._over.wait(INTERVAL_S):
                return

    def _traces(self) -> None:
        while TIMELINE.traced:
            write_trace(self._out / FOLDER, TIMELINE.traced.popleft())

    def _try(self, work: Callable[[], None]) -> None:
        """Run ``work``; its failure is reported once."""
        try:
            work()
        except (OSError, UserError) as error:
            self._report(str(error), None)
        except Exception as error:
            self._report(f"{type(error).__name__}: {error}", error)

    def _report(self, text: str, error: Exception | None) -> None:
        if text not in self._failures:
            self._failures.add(text)
            log.warning("status.json could not be updated: %s", text, exc_info=error)

    def _stacks(self) -> Mapping[str, str]:
        """Return the stacks of the run's processes by host; other hosts are asked through the event loop."""
        host = socket.gethostname()
        ranks = [] if self.ranks is None else self.ranks.processes
        # With an external launcher or Ray cluster they are not below this process.
        others = [pid for where, pid in ranks if where == host]
        others += [] if self.rollout is None else marked(self.rollout.run_id)
        tasks = "" if self._loop is None else f"== tasks of the controller\n{task_stacks(self._loop)}\n"
        found = {host: tasks + stacks(run_processes(others))}
        if self.nodes is not None and self._loop is not None:
            asking = asyncio.run_coroutine_threadsafe(self.nodes.stacks(host), self._loop)
            try:
                found |= asking.result(2 * STACKS_S)
            except TimeoutError:
                asking.cancel()
                found["others"] = "not asked, because the controller itself hangs\n"
        asked = set(found)
        for where, pid in ranks:
            if where not in asked:
                found[where] = f"{found.get(where, '')}pid {pid}: not asked; `py-spy dump --pid {pid}` there\n"
        return found


class _Kept(logging.Handler):
    """Keeps the newest warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.newest: deque[Alert] = deque(maxlen=MAX_ALERTS)

    def emit(self, record: logging.LogRecord) -> None:
        self.newest.append(Alert(record.created, record.levelname, record.getMessage()))


class _Memory:
    """Resident memory of the run's processes on this host, measured every few seconds."""

    def __init__(self) -> None:
        self._read = float("-inf")
        self._found: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """Return ``RunStatus.memory``."""
        if time.monotonic() - self._read >= MEMORY_INTERVAL_S:
            self._read, self._found = time.monotonic(), self._measure()
        return self._found

    @staticmethod
    def _measure() -> dict[str, int]:
        me, host = psutil.Process(), psutil.virtual_memory()
        found = {"controller": me.memory_info().rss, "ranks": 0, "rollout": 0}
        for child in me.children(recursive=True):
            try:
                kind = "ranks" if child.cmdline()[-1:] == ["rank"] else "rollout"
                found[kind] += child.memory_info().rss
            except psutil.Error:  # expected: it has ended
                continue
        return found | {"host_used": host.total - host.available, "host_total": host.total}


def _phase(phase: Phase) -> PhaseStatus:
    awaited = [] if phase.seconds is not None else [AwaitedStatus(**asdict(one)) for one in phase.awaited]
    return PhaseStatus(phase.name, phase.began, phase.seconds, phase.done, phase.total, awaited)


def _engine(reading: EngineReading) -> EngineStatus:
    counts, steps = reading.counts, reading.counts.steps or 1
    return EngineStatus(
        name=reading.name,
        serving=reading.serving,
        running=counts.running / steps,
        waiting=counts.waiting / steps,
        kv_usage=counts.kv_usage / steps,
        tokens_per_s=counts.generated_tokens / reading.seconds,
    )


def _environment(tally: EnvironmentTally) -> EnvironmentStatus:
    return EnvironmentStatus(
        episodes=tally.episodes,
        known=tally.known,
        reward=tally.rewards / tally.known if tally.known else None,
        tool_calls=tally.tool_calls,
        tool_errors=tally.tool_errors,
        quarantined=tally.quarantined,
    )
