"""Every episode started ends exactly once; these counts prove it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


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
    """

    started: int = 0
    known: int = 0
    unknown: int = 0
    retried: int = 0
    aborted: int = 0
    unstarted: int = 0

    def __add__(self, other: Accounting) -> Accounting:
        return Accounting(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Accounting)})

    def check(self, wanted: int) -> None:
        """Raise RuntimeError unless the counts add up to ``wanted`` returned trajectories."""
        ended = self.known + self.unknown + self.retried + self.aborted
        if self.started + self.unstarted != ended or self.known + self.unknown != wanted:
            raise RuntimeError(f"episodes do not add up: {asdict(self)}, {wanted} wanted")
