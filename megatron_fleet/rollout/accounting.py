"""Every episode started ends exactly once; these counts prove it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Trajectory


@dataclass(slots=True)
class Accounting:
    """What became of the episodes of one collection. An attempt counts as an episode of its own.

    Attributes:
        started: attempts handed to a worker.
        known: returned with a reward.
        unknown: returned without one, because no attempt was left.
        retried: ended with an unknown reward and was played again from the start.
        aborted: went down with an engine or a worker and was issued again.
        unstarted: given up before a worker had it, because the collection's budget was over.
        stale: returned, too old to be trained on, and played again from the start.
    """

    started: int = 0
    known: int = 0
    unknown: int = 0
    retried: int = 0
    aborted: int = 0
    unstarted: int = 0
    stale: int = 0

    def __add__(self, other: Accounting) -> Accounting:
        return Accounting(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Accounting)})

    def all_retried(self) -> Accounting:
        """The counts when everything that is unknown is played again."""
        return replace(self, unknown=0, retried=self.retried + self.unknown)

    def outdated(self, trajectories: Sequence[Trajectory]) -> Accounting:
        """The counts when these returned trajectories are played again because they are too old."""
        known = sum(t.reward is not None for t in trajectories)
        unknown = len(trajectories) - known
        return replace(
            self, known=self.known - known, unknown=self.unknown - unknown, stale=self.stale + len(trajectories)
        )

    def check(self, wanted: int) -> None:
        """Raise RuntimeError unless the counts add up to ``wanted`` returned trajectories."""
        ended = self.known + self.unknown + self.retried + self.aborted + self.stale
        if self.started + self.unstarted != ended or self.known + self.unknown != wanted:
            raise RuntimeError(f"episodes do not add up: {asdict(self)}, {wanted} wanted")
