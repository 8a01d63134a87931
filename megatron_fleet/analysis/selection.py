"""Select the trajectories of a page: from every file, up to a limit, with all kinds of endings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.run import TRAINING, Run

PER_FILE = 60
STEP_FILES = 8
T = TypeVar("T")


def round_robin(groups: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield items round-robin over the groups until all are exhausted."""
    missing = object()
    for row in zip_longest(*groups, fillvalue=missing):
        yield from (item for item in row if item is not missing)  # type: ignore[misc]


def spread(steps: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` of the sorted steps, evenly spaced, including the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def sample(episodes: Sequence[Episode], limit: int) -> list[Episode]:
    """Return at most ``limit`` episodes, round-robin over environment, outcome and result, so rare endings appear."""
    groups: dict[tuple[str, str, str], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault((episode.env, episode.outcome, episode.result), []).append(episode)
    ordered = [group for _, group in sorted(groups.items())]
    return [episode for episode, _ in zip(round_robin(ordered), range(limit), strict=False)]


def browsable(run: Run) -> tuple[list[Episode], dict[tuple[str, int], int]]:
    """Return the episodes to browse, round-robin over files so that a budget cuts evenly, and each file's total."""
    files: list[list[Episode]] = []
    totals: dict[tuple[str, int], int] = {}
    training = [(TRAINING, step) for step in spread(run.training_steps, STEP_FILES)]
    for kind, step in dict.fromkeys([*sorted(run.compared), *training]):
        episodes = run.compared.get((kind, step)) or run.read_step(kind, step)
        files.append(sample(episodes, PER_FILE))
        totals[kind, step] = len(episodes)
    return list(round_robin(files)), totals
