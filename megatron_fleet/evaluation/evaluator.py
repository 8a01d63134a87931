"""Evaluator: chooses held-out tasks and plays them, synchronously or in the background while the trainer computes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Protocol

from megatron_fleet.agents.trajectory import Group
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import EvalConfig, RolloutConfig, RunConfig
from megatron_fleet.data.near import near_duplicates
from megatron_fleet.data.split import key_hash
from megatron_fleet.data.task import Task
from megatron_fleet.rollout.collection import OnEpisode
from megatron_fleet.rollout.requests import Accounting, CollectRequest, CollectResult, EngineKind
from megatron_fleet.telemetry.episodes import eval_metrics, trajectories_of, why_nothing_can_be_known
from megatron_fleet.telemetry.metrics import attempt_metrics

SEED_STEP = 0
"""Step for the sampling seeds of all evaluations, so that two of them differ only by the weights."""
FEW_TASKS = 5
"""With fewer distinct tasks an environment's pass rate is not meaningful."""

ShowPhase = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a phase with this many units of work; its context value is called with the number done."""


class Collect(Protocol):
    """Play a request, as ``RolloutService.collect`` does."""

    async def __call__(self, request: CollectRequest, on_episode: OnEpisode | None) -> CollectResult: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation.

    Attributes:
        sampled: the episodes at the training temperature.
        greedy: those at temperature 0.
        accounting: accounting of the attempts at both.
        held_out: number of tasks from which the played ones were chosen.
        seconds: duration.
    """

    sampled: list[Group]
    greedy: list[Group]
    accounting: Accounting
    held_out: int
    seconds: float

    def metrics(self, pass_threshold: float) -> dict[str, float]:
        """Compute ``eval/`` and ``timing/eval``. ``pass_threshold``: ``eval.pass_threshold``."""
        return {
            **eval_metrics(self.sampled, self.greedy, pass_threshold),
            **attempt_metrics(asdict(self.accounting), "eval/all"),
            "eval/all/tasks_held_out": self.held_out,
            "timing/eval": self.seconds,
        }


class Evaluator:
    """Evaluator on a fixed set of held-out tasks, one evaluation at a time."""

    def __init__(
        self,
        settings: EvalConfig,
        rollout: RolloutConfig,
        run: RunConfig,
        held_out: Sequence[Task],
        collect: Collect,
    ) -> None:
        self._settings, self._rollout, self._run, self._collect = settings, rollout, run, collect
        self.tasks, self._held_out = choose(held_out, settings.tasks), len(held_out)
        self._running: asyncio.Task[Evaluation] | None = None

    async def play(self, show: ShowPhase | None, engines: EngineKind = "rollout") -> Evaluation:
        """Evaluate the engines' current weights. ``show``: ``None``: its progress is not shown."""
        return await self._play(show, None, engines)

    def start(self, follows: int | None = None) -> None:
        """Start an evaluation of the engines' current weights in the background. ``follows``: see `CollectRequest`."""
        assert self._running is None, "one evaluation at a time"
        self._running = asyncio.create_task(self._play(None, follows))

    async def finish(self) -> Evaluation:
        """Wait for the evaluation that was started. Raises what it raised; cancelling stops it."""
        assert self._running is not None, "start() comes first"
        running, self._running = self._running, None
        return await running

    async def close(self) -> None:
        """Stop a background evaluation, so that it no longer uses the rollout. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running

    async def _play(
        self, show: ShowPhase | None, follows: int | None = None, engines: EngineKind = "rollout"
    ) -> Evaluation:
        settings, started = self._settings, time.monotonic()
        share = settings.samples / (settings.samples + settings.greedy)
        budget = None if settings.budget_s is None else settings.budget_s * share
        temperature = self._rollout.sampling.temperature
        sampled = await self._episodes(settings.samples, temperature, budget, show, follows, engines)
        max_context = self._rollout.max_context
        if never := why_nothing_can_be_known(trajectories_of(sampled.groups), max_context):
            raise UserError(f"evaluation: {never}")
        accounting, greedy = sampled.accounting, []
        if settings.greedy:
            if settings.budget_s is not None:
                budget = max(settings.budget_s - sampled.seconds, 0)  # excludes the engines' start-up time
            result = await self._episodes(1, 0.0, budget, show, follows, engines)
            accounting, greedy = accounting + result.accounting, result.groups
        return Evaluation(sampled.groups, greedy, accounting, self._held_out, time.monotonic() - started)

    async def _episodes(
        self,
        samples: int,
        temperature: float,
        budget_s: float | None,
        show: ShowPhase | None,
        follows: int | None,
        engines: EngineKind,
    ) -> CollectResult:
        run = self._run
        request = CollectRequest(
            step=SEED_STEP,
            tasks=self.tasks,
            samples=samples,
            temperature=temperature,
            purpose="eval",
            seed=run.seed if run.deterministic else None,
            budget_s=budget_s,
            follows=follows,
            engines=engines,
        )
        if show is None:
            return await self._collect(request, None)
        with show("evaluation" if temperature else "greedy evaluation", len(self.tasks) * samples) as advance:
            ended = itertools.count(1)
            return await self._collect(request, lambda _: advance(next(ended)))


def choose(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """Choose at most ``limit`` of ``tasks`` (``None``: all), round-robin over environments, smallest hashes first.

    They are returned in their original order. The order of a file does not affect the choice and added tasks change
    little of it, it agrees with what ``data.max_eval_per_env`` keeps, and a larger limit gives a superset.
    """
    taken: defaultdict[str, int] = defaultdict(int)
    turns = []
    for index in sorted(range(len(tasks)), key=lambda i: key_hash(tasks[i].key)):
        env_key = tasks[index].env_key
        turns.append((taken[env_key], env_key, index))
        taken[env_key] += 1
    return [tasks[index] for index in sorted(index for _, _, index in sorted(turns)[:limit])]


def notes(chosen: Sequence[Task], held_out: Sequence[Task]) -> list[str]:
    """Return sentences to print at the start of an evaluation of ``chosen``, a subset of ``held_out``: tasks left out,
    and environments with fewer than ``FEW_TASKS`` distinct tasks, where near-duplicates (`data.near`) count once."""
    found = []
    if len(chosen) < len(held_out):
        found.append(f"{len(chosen)} of {len(held_out)} evaluation tasks are played (eval.tasks).")
    counts = Counter(task.env_key for task in chosen)
    different = counts - Counter(task.env_key for group in near_duplicates(chosen) for task in group[1:])
    few = [f"{env} {different[env]} of {counts[env]}" for env in sorted(counts) if different[env] < FEW_TASKS]
    if few:
        found.append(
            f"Environments with fewer than {FEW_TASKS} different evaluation tasks, whose pass rates are imprecise "
            f"(tasks with nearly the same prompt count once): {', '.join(few)}."
        )
    return found
