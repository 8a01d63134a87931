"""Requests to the rollout, and their results: every started episode ends exactly once (`Accounting`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from megatron_fleet.agents.trajectory import Group, Trajectory
from megatron_fleet.config.errors import UserError
from megatron_fleet.data.task import Task

EngineKind = Literal["rollout", "eval"]
"""Which engines play: those of the rollout, or those for evaluations alone (`eval.engines`)."""


class RolloutFailed(Exception):
    """A component kept failing. The run should stop; it can be resumed from its newest checkpoint."""


class EnvironmentFailed(RolloutFailed, UserError):
    """The run's own environment server kept failing for ``env.outage_limit_s``. The run can be resumed."""


@dataclass(frozen=True, slots=True)
class CollectRequest:
    """Request to play each of ``tasks`` ``samples`` times.

    ``seed``, with step, purpose, task and sample, determines every sampled token; ``None``: sampling is unseeded. An
    evaluation starts every task once, taking the environments round-robin, before it starts any task again. After
    ``budget_s`` seconds unfinished episodes are given up as ``aborted``.

    ``first``: number of the first task's group; part of the seed, because a step may contain the same task twice.
    ``follows``: the request gets places after the groups of training steps up to this one, and before those of later
    ones; ``None``: in the order of the calls.
    ``played``: existing episodes by ``(group, sample)``; they are part of the result, but not counted.
    """

    step: int
    tasks: Sequence[Task]
    samples: int
    temperature: float
    purpose: Literal["train", "eval"]
    seed: int | None
    budget_s: float | None = None
    played: Mapping[tuple[int, int], Trajectory] = field(default_factory=dict)
    first: int = 0
    follows: int | None = None
    engines: EngineKind = "rollout"


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode to play.

    Attributes:
        step: training step, for the seed only.
        temperature: 0 is greedy.
        seed: seed of the run; ``None`` leaves sampling unseeded.
        attempt: 0, then +1 for each retry.
        trained: the policy may be trained on it; otherwise data that only training needs is not kept.
        collection: number of its collection, unique within the rollout.
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
    engines: EngineKind = "rollout"

    @property
    def name(self) -> str:
        """Name of the episode for its environment; equal runs give equal names."""
        return f"{self.step}/{self.group}/{self.sample}/{self.attempt}/{self.task.key}"


@dataclass(slots=True)
class Accounting:
    """Counts of episodes by outcome, of one group, one step or one evaluation. Each attempt counts as an episode.

    Attributes:
        started: handed to a worker.
        known: returned with a reward.
        unknown: returned without a reward, because no attempt was left.
        retried: ended with an unknown reward and played again from the start.
        aborted: lost with an engine or a worker and issued again.
        unstarted: given up before they reached a worker, because the collection's budget was exhausted.
        stale: returned, but too stale to train on, and played again from the start.
        unfinished: stopped before they ended, because the batch was full, and played again from the start.
        replaced: returned, but their group had no signal, and another task was played in its place.
    """

    started: int = 0
    known: int = 0
    unknown: int = 0
    retried: int = 0
    aborted: int = 0
    unstarted: int = 0
    stale: int = 0
    unfinished: int = 0
    replaced: int = 0

    def __add__(self, other: Accounting) -> Accounting:
        return Accounting(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Accounting)})

    def all_retried(self) -> Accounting:
        """Return the counts when all episodes with an unknown reward are played again."""
        return replace(self, unknown=0, retried=self.retried + self.unknown)

    def moved(self, trajectories: Sequence[Trajectory], to: Literal["stale", "unfinished", "replaced"]) -> Accounting:
        """Return the counts when these returned trajectories are not part of the result after all, but count as
        ``to``.
        """
        known = sum(t.reward is not None for t in trajectories)
        unknown, moved = len(trajectories) - known, getattr(self, to) + len(trajectories)
        counts = replace(self, known=self.known - known, unknown=self.unknown - unknown)
        setattr(counts, to, moved)
        return counts

    def check(self, wanted: int) -> None:
        """Raise RuntimeError unless the counts add up to ``wanted`` returned trajectories."""
        again = self.retried + self.aborted + self.stale + self.unfinished + self.replaced
        ended = self.known + self.unknown + again
        if self.started + self.unstarted != ended or self.known + self.unknown != wanted:
            raise RuntimeError(f"episodes do not add up: {asdict(self)}, {wanted} wanted")


@dataclass(slots=True)
class CollectResult:
    """Result of a collection.

    Attributes:
        groups: one per task, in request order, each with its trajectories by ``sample``.
        seconds: from the request to the last episode.
    """

    groups: list[Group]
    accounting: Accounting
    seconds: float
