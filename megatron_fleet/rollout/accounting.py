"""Accounting of episodes: verifies that every started episode ends exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fleet.agents.trajectory import Trajectory


@dataclass(slots=True)
class Accounting:
    """Counts of one collection's episodes by outcome. Each attempt counts as an episode.

    Attributes:
        started: handed to a worker.
        known: returned with a reward.
        unknown: returned without a reward, because no attempt was left.
        retried: ended with an unknown reward and played again from the start.
        aborted: lost with an engine or a worker and issued again.
        unstarted: given up before they reached a worker, because the collection's budget was exhausted.
        stale: returned, but too stale to train on, and played again from the start.
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
        """Return the counts when all episodes with an unknown reward are played again."""
        return replace(self, unknown=0, retried=self.retried + self.unknown)

    def outdated(self, trajectories: Sequence[Trajectory]) -> Accounting:
        """Return the counts when these returned trajectories are played again because they are too stale."""
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
