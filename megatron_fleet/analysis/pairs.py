"""Pairs of attempts at the same task before and after training, with their first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.selection import round_robin

MAX_PAIRS = 30


@dataclass(frozen=True, slots=True)
class Pair:
    """One task and sample index at the first and at the last evaluation.

    ``divergence`` is the index of the first message that differs, ``None`` when the conversations are equal.
    """

    before: Episode
    after: Episode
    divergence: int | None

    @property
    def verdict(self) -> str:
        """``gained``, ``lost``, ``same`` or ``unknown``, by whether each attempt solved the task."""
        first, last = self.before.solved, self.after.solved
        if first is None or last is None:
            return "unknown"
        return "same" if first == last else "gained" if last else "lost"


def choose_pairs(before: Sequence[Episode], after: Sequence[Episode], limit: int = MAX_PAIRS) -> list[Pair]:
    """Choose pairs, one per task: gained and lost ones first, then the others, round-robin over environments."""
    last = {(e.task, e.sample): e for e in after}
    pairs = [
        Pair(e, other, first_difference(e, other))
        for e in before
        if (other := last.get((e.task, e.sample))) is not None
    ]
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.verdict, pair.before.env), []).append(pair)
    chosen: dict[str, Pair] = {}
    for verdicts in (("gained", "lost"), ("same", "unknown")):
        ordered = [group for key, group in sorted(groups.items()) if key[0] in verdicts]
        for pair in round_robin(ordered):
            if len(chosen) < limit:
                chosen.setdefault(pair.before.task, pair)
    return list(chosen.values())


def first_difference(a: Episode, b: Episode) -> int | None:
    """Return the index of the first message that differs in role or text, or that only one episode has."""
    for index, (one, other) in enumerate(zip(a.messages, b.messages, strict=False)):
        if one != other:
            return index
    return None if len(a.messages) == len(b.messages) else min(len(a.messages), len(b.messages))
