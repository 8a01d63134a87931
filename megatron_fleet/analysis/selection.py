"""Selection of what a page shows: trajectories of every file with all kinds of endings, and pairs before and after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from megatron_fleet.analysis.episodes import Episode
from megatron_fleet.analysis.run import STEP_FILES, TRAINING, Run, spread

PER_FILE = 60
MAX_PAIRS = 30
T = TypeVar("T")


def round_robin(groups: Sequence[Sequence[T]]) -> Iterator[T]:
    """Yield items round-robin over the groups until all are exhausted."""
    missing = object()
    for row in zip_longest(*groups, fillvalue=missing):
        yield from (item for item in row if item is not missing)  # type: ignore[misc]


def sample(episodes: Sequence[Episode], limit: int) -> list[Episode]:
    """Return at most ``limit`` episodes, round-robin over environment, outcome and result, so rare endings appear."""
    groups: dict[tuple[str, str, str], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault((episode.env, episode.outcome, episode.result), []).append(episode)
    ordered = [group for _, group in sorted(groups.items())]
    return [episode for episode, _ in zip(round_robin(ordered), range(limit), strict=False)]


@dataclass(frozen=True, slots=True)
class EpisodeTime:
    """Seconds of a training episode; ``sampling_s``: those in which an engine sampled."""

    step: int
    env: str
    task: str
    seconds: float
    sampling_s: float


def times_of(episodes: Iterable[Episode]) -> list[EpisodeTime]:
    """Return the times of the training episodes among these that have one."""
    return [
        EpisodeTime(e.step, e.env, e.task, e.metrics["seconds"], e.metrics.get("generate_s", 0.0))
        for e in episodes
        if e.kind == TRAINING and e.metrics.get("seconds")
    ]


def browsable(run: Run) -> tuple[list[Episode], dict[tuple[str, int], int], list[EpisodeTime]]:
    """Return the episodes to browse, round-robin over files so that a budget cuts evenly, each file's total, and the
    times of all training episodes in these files.
    """
    files: list[list[Episode]] = []
    totals: dict[tuple[str, int], int] = {}
    times: list[EpisodeTime] = []
    training = [(TRAINING, step) for step in spread(run.training_steps, STEP_FILES)]
    for kind, step in dict.fromkeys([*sorted(run.compared), *training]):
        episodes = run.compared.get((kind, step)) or run.read_step(kind, step)
        files.append(sample(episodes, PER_FILE))
        totals[kind, step] = len(episodes)
        times += times_of(episodes)
    return list(round_robin(files)), totals, times


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
