"""What is asked of the rollout, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_fleet.agents.trajectory import Group, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.rollout.accounting import Accounting


class RolloutFailed(Exception):
    """A component kept failing. The run should stop; its newest checkpoint is where to go on from."""


@dataclass(frozen=True, slots=True)
class CollectRequest:
    """Play each of ``tasks`` ``samples`` times.

    ``seed`` decides every sampled token, together with step, purpose, task and sample; ``None`` leaves
    sampling to chance. Of an evaluation, every task is begun once, environments by turns, before any is begun again.
    After ``budget_s`` seconds what is not over is given up as ``aborted``.

    ``played``: episodes by ``(group, sample)`` that are there already; they are part of the result and of no count.
    """

    step: int
    tasks: Sequence[Task]
    samples: int
    temperature: float
    purpose: Literal["train", "eval"]
    seed: int | None
    budget_s: float | None = None
    played: Mapping[tuple[int, int], Trajectory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to play.

    Attributes:
        step: training step, for the seed only.
        temperature: 0 is greedy.
        seed: of the run; ``None`` leaves sampling unseeded.
        attempt: 0, then +1 for each retry; it names the episode to environments.
        trained: a policy may learn from it; what only training needs is not kept otherwise.
        collection: the collection that it is of; no two of a rollout have the same number.
    """

    task: Task
    group: int
    sample: int
    step: int
    temperature: float
    seed: int | None = None
    attempt: int = 0
    trained: bool = True
    collection: int = 0


@dataclass(slots=True)
class CollectResult:
    """``groups``: one per task, in the order asked; each holds ``samples`` trajectories in order of ``sample``."""

    groups: list[Group]
    accounting: Accounting
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Of one collection: trajectories returned, wanted, and tokens sampled in the returned ones."""

    done: int
    total: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Since the start: what engines generated and used, and components replaced."""

    tokens: int
    requests: int
    engine_cpu_seconds: float
    restarts: int
