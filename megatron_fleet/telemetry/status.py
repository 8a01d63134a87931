"""``status.json``: what a run does now. The controller replaces it while it runs; `mfleet top` and pages read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.storage.local import write_atomically

STATUS = "status.json"
"""Name of the file in ``run.out``."""
INTERVAL_S = 1.0
"""Least seconds between two versions of the file."""
MAX_ALERTS = 20
"""Newest warnings that the file has."""

Time = Annotated[float, Field(ge=0, le=1e11)]
"""Seconds, of a duration or since 1970."""
Count = Annotated[int, Field(ge=0, le=1 << 60)]
Number = Annotated[float, Field(ge=-1e15, le=1e15)]
State = Literal["running", "finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class AwaitedStatus:
    """A group of episodes that a phase waits for.

    Attributes:
        name, kind: its task and environment.
        began: unix time.
        done, total: its episodes that have ended, and all of them.
    """

    name: str
    kind: str
    began: Time
    done: Count = 0
    total: Count = 0


@dataclass(frozen=True, slots=True)
class PhaseStatus:
    """One phase of the current step, or of the time before the first one.

    Attributes:
        began: unix time.
        seconds: its duration; ``None`` while it runs.
        done, total: units of work, such as episodes; ``total`` is 0 where they cannot be counted.
        awaited: groups that it waits for, those that began first.
    """

    name: str
    began: Time
    seconds: Time | None = None
    done: Count = 0
    total: Count = 0
    awaited: list[AwaitedStatus] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine in the last few seconds.

    Attributes:
        serving: whether it answers requests; false while it starts or is being replaced.
        running, waiting: mean number of requests that it computed, and that waited.
        kv_usage: mean share of the KV cache in use.
        tokens_per_s: sampled tokens per second of the clock.
    """

    name: str
    serving: bool
    running: Number = 0.0
    waiting: Number = 0.0
    kv_usage: Number = 0.0
    tokens_per_s: Number = 0.0


@dataclass(frozen=True, slots=True)
class EnvironmentStatus:
    """Episodes of one environment that returned since the current step began; those played ahead are among them.

    Attributes:
        episodes: all of them.
        known: those with a reward.
        reward: mean of the known rewards; ``None`` without any.
        tool_calls, tool_errors: their calls, and those that failed.
        quarantined: episodes that were not played because the environment is in quarantine.
    """

    episodes: Count
    known: Count
    reward: Number | None
    tool_calls: Count
    tool_errors: Count
    quarantined: Count


@dataclass(frozen=True, slots=True)
class Alert:
    """A warning of the controller. ``level``: as of `logging`, ``WARNING`` or ``ERROR``."""

    time: Time
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class RunStatus:
    """State of a run at one moment. Times are unix seconds.

    Attributes:
        state: of this attempt; a run that was killed stays ``running``, its ``time`` gets old.
        host, pid: the controller's.
        time: when this was written.
        started: when the attempt began.
        step: training steps that are finished; ``steps``: of the whole run.
        step_began: when the current step began; ``None`` before the first one.
        phases: of the current step, in the order in which they began; several may run at once.
        engines: in order.
        environments: by key, see `EnvironmentStatus`.
        playing, waiting: episodes that workers have, and that wait for a worker.
        memory: resident bytes of the run's processes on the controller's host by kind (``controller``, ``ranks``,
            ``rollout``), and of the host ``host_used`` and ``host_total``.
        alerts: the newest warnings, oldest first.
        allowed: episodes that may play now; ``None``: the number does not follow the engines' load.
    """

    name: str
    id: str
    state: State
    host: str
    pid: int
    time: Time
    started: Time
    step: Count
    steps: Count
    step_began: Time | None = None
    phases: list[PhaseStatus] = field(default_factory=list)
    engines: list[EngineStatus] = field(default_factory=list)
    environments: dict[str, EnvironmentStatus] = field(default_factory=dict)
    playing: Count = 0
    waiting: Count = 0
    memory: dict[str, Count] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)
    allowed: Count | None = None

    def write(self, out: Path) -> None:
        """Replace the file in ``out``."""
        write_atomically(out / STATUS, (json.dumps(asdict(self)) + "\n").encode())


def read_status(out: Path) -> RunStatus | None:
    """Read the status of a run; ``None``: it has not written one.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    path = out / STATUS
    if not path.exists():
        return None
    remedy = "remove it, the run writes it again"
    value = read_object(path, remedy)
    try:
        return TypeAdapter(RunStatus).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"{path}: {where}: {first['msg']}; {remedy}.") from None
