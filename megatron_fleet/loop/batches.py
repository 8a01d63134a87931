"""Training batches: tasks from the sampler are played by the rollout and turned into data, optionally in advance.

The unit is the group: each is requested, counted and played again on its own, and is looked at when it comes back. With
``rollout.max_staleness`` = k the groups of the next k steps play while the trainer works on the current step. A group
is trained on when its oldest token was sampled at most k weight versions ago; an older one is played again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np

from megatron_fleet.agents.trajectory import Group, Trajectory
from megatron_fleet.algorithms.advantages import is_known
from megatron_fleet.algorithms.batch import Batch, build_data, split_batch
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.data.sampler import make_sampler
from megatron_fleet.data.task import Task
from megatron_fleet.platform.alerts import alert
from megatron_fleet.rollout.collection import OnEpisode
from megatron_fleet.rollout.requests import Accounting, CollectRequest, CollectResult, RolloutFailed
from megatron_fleet.telemetry.episodes import trajectories_of, why_nothing_can_be_known, why_nothing_is_known

log = logging.getLogger(__name__)

FIRST_PROBE_S = 2.0
LONGEST_PROBE_S = 60.0
"""Most seconds between two probes of the environment in an outage; the pause doubles from ``FIRST_PROBE_S``."""

ShowProgress = Callable[[int], None]
"""Shows how many episodes of a step have ended."""


class Episodes(Protocol):
    """The part of `rollout.service.RolloutService` that plays episodes."""

    async def collect(self, request: CollectRequest, on_episode: OnEpisode | None = None) -> CollectResult: ...

    async def environment_available(self) -> str | None: ...


class Outage(UserError):
    """No reward became known for ``env.outage_limit_s``, or none can; the run can be resumed."""


@dataclass(slots=True)
class StepBatch:
    """Input of one training step.

    Attributes:
        groups: all groups that were played, in the order of their tasks.
        updates: data of each optimizer step; empty when no group had a signal.
        staleness: int64 ``[N]``: for each sampled span of tokens, weight versions between its sampling and now.
        seconds: durations by name, for ``timing/``.
        waits: shares of the time since the batch before, for ``async/``.
    """

    groups: list[Group]
    batch: Batch
    updates: list[list[Datum]]
    accounting: Accounting
    staleness: np.ndarray
    seconds: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _GroupPlay:
    """One group of a step, in play or back.

    Attributes:
        place: its number within the step.
        work: its newest attempt.
        accounting: counts of its earlier attempts.
        ended: episodes of the newest attempt that have ended.
    """

    step: int
    place: int
    task: Task
    work: asyncio.Task[CollectResult] = field(init=False)
    accounting: Accounting = field(default_factory=Accounting)
    ended: int = 0


@final
class Batches:
    """Make batches from the sampler's tasks. After a resume (``state``, ``load``), tasks that were handed out but not
    trained on come first."""

    def __init__(self, config: Config, tasks: Sequence[Task], rollout: Episodes) -> None:
        self._config, self._rollout = config, rollout
        self._sampler = make_sampler(tasks, config.rollout.prompts_per_step, config.run.seed, config.data.mixture)
        self._by_key = {task.key: task for task in tasks}
        self._plays: list[_GroupPlay] = []
        self._again: deque[list[Task]] = deque()
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self._taken: float | None = None

    async def next(self, step: int, show: ShowProgress) -> StepBatch:
        """Return the batch of step ``step`` (from 0); the engines hold weight version ``step``.

        Raises:
            Outage: no reward became known for too long, or none can.
            RolloutFailed: an engine or a worker died too often.
            EnvironmentFailed: the run's own environment server failed for too long.
        """
        began = time.monotonic()
        before = began if self._taken is None else self._taken
        self._play_ahead(step)
        plays = [play for play in self._plays if play.step == step]
        async with _shown(plays, show):
            results = await self._complete(step, plays)
        self._plays = [play for play in self._plays if play.step != step]
        self._taken = now = time.monotonic()
        waited, idle = now - began, self._take_idle(now)
        groups = [group for result in results for group in result.groups]
        counts = (play.accounting + result.accounting for play, result in zip(plays, results, strict=True))
        built = self._build(step, groups, sum(counts, start=Accounting()))
        generate = max(result.seconds for result in results)
        built.seconds |= {"generate": generate, "rollout_wait": waited, "engines_idle": idle}
        if passed := now - before:
            built.waits = {"trainer_waits_share": waited / passed, "engines_idle_share": idle / passed}
        return built

    def trained(self, groups: Sequence[Group]) -> None:
        """Report the rewards of a step's groups to the sampler, for a curriculum."""
        rewards = ((g.task_key, [t.reward for t in g.trajectories if is_known(t.reward)]) for g in groups)
        self._sampler.observe(rewards)

    def status(self, groups: Sequence[Group]) -> dict[str, dict[str, float]]:
        """Return the status of the `data.sampler.Sampler`, plus ``mix``, each environment's share of ``groups``."""
        found, counts = self._sampler.status(), Counter(group.env_key for group in groups)
        return {"mix": {env: counts[env] / max(len(groups), 1) for env in found["mix_total"]}, **found}

    def state(self) -> dict[str, Any]:
        """JSON-able state for `load`."""
        handed_out: defaultdict[int, list[str]] = defaultdict(list)
        for play in self._plays:
            handed_out[play.step].append(play.task.key)
        pending = [*handed_out.values(), *([task.key for task in tasks] for tasks in self._again)]
        return {"sampler": self._sampler.state_dict(), "pending": pending}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`.

        Raises:
            UserError: it belongs to other tasks.
        """
        self._sampler.load_state_dict(state["sampler"])
        self._again = deque([self._by_key[key] for key in keys] for keys in state.get("pending", ()))

    async def close(self) -> None:
        """Cancel the running episodes. Idempotent."""
        plays, self._plays = self._plays, []
        for play in plays:
            play.work.cancel()
        await asyncio.gather(*(play.work for play in plays), return_exceptions=True)

    def _play_ahead(self, step: int) -> None:
        """Request the groups of ``step``, and of the steps that may play ahead."""
        last = min(step + self._config.rollout.max_staleness, self._config.run.last_step - 1)
        first = self._plays[-1].step + 1 if self._plays else step
        for number in range(first, last + 1):
            tasks = self._again.popleft() if self._again else self._sampler.next()
            plays = [_GroupPlay(number, place, task) for place, task in enumerate(tasks)]
            self._plays += plays
            for play in plays:
                self._start(play)

    def _start(self, play: _GroupPlay) -> None:
        """Play a group, or play it again."""
        play.ended = 0
        play.work = asyncio.create_task(self._collect(play))
        play.work.add_done_callback(self._returned)
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    def _returned(self, _work: asyncio.Task[CollectResult]) -> None:
        if all(play.work.done() for play in self._plays):
            self._idle_since = time.monotonic()

    def _take_idle(self, now: float) -> float:
        """Seconds from the last call until ``now`` during which no training episode was running."""
        idle = self._idle_s
        if self._idle_since is not None:
            idle += now - self._idle_since
            self._idle_since = now
        self._idle_s = 0.0
        return idle

    async def _collect(self, play: _GroupPlay) -> CollectResult:
        run, rollout = self._config.run, self._config.rollout
        request = CollectRequest(
            step=play.step,
            tasks=[play.task],
            samples=rollout.samples_per_prompt,
            temperature=rollout.sampling.temperature,
            purpose="train",
            seed=run.seed if run.deterministic else None,
            first=play.place,
        )

        def ended(_: Trajectory) -> None:
            play.ended += 1

        return await self._rollout.collect(request, ended)

    async def _complete(self, step: int, plays: Sequence[_GroupPlay]) -> list[CollectResult]:
        """Wait for all groups of a step; while not one reward is known, wait for the environment and play all again.

        Raises:
            Outage: no reward became known for too long, or every attempt would end in the same way.
        """
        began, pause = None, FIRST_PROBE_S
        while True:
            results = await asyncio.gather(*(self._fresh(play, step) for play in plays))
            trajectories = [t for result in results for t in trajectories_of(result.groups)]
            reason = why_nothing_is_known(trajectories)
            if reason is None:
                break
            if never := why_nothing_can_be_known(trajectories, self._config.rollout.max_context):
                raise Outage(f"step {step + 1}: {never}")
            alert(log, "outage", f"step {step + 1}: not one reward is known; most often {reason}")
            began = time.monotonic() if began is None else began
            pause = await self._wait_for_environment(step, reason, began, pause)
            for play, result in zip(plays, results, strict=True):
                play.accounting += result.accounting.all_retried()
                self._start(play)
        if stale := sum(play.accounting.stale > 0 for play in plays):
            log.warning("step %d: %d groups were too old and were played again", step + 1, stale)
        return results

    async def _fresh(self, play: _GroupPlay, version: int) -> CollectResult:
        """Wait for a group; one that is too old is played again.

        Raises:
            RolloutFailed: an engine samples with weights that are too old.
        """
        most, result = self._config.rollout.max_staleness, await play.work
        if age(result.groups[0], version) > most:
            play.accounting += result.accounting.outdated(result.groups[0].trajectories)
            self._start(play)
            result = await play.work
        if (oldest := age(result.groups[0], version)) > most:
            raise RolloutFailed(
                f"step {play.step + 1}: an engine samples with weights that are {oldest} versions old although it was "
                f"given version {version}."
            )
        return result

    async def _wait_for_environment(self, step: int, reason: str, began: float, pause: float) -> float:
        """Wait until the environment answers, at least ``pause`` seconds; returns the next pause."""
        limit = self._config.env.outage_limit_s
        while True:
            waited = time.monotonic() - began
            if waited + pause > limit:
                raise Outage(
                    f"step {step + 1}: not one reward became known for {waited:.0f} s (env.outage_limit_s={limit:g}), "
                    f"most often: {reason}; fix the environment, then run the same command again to resume."
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PROBE_S)
            problem = await self._rollout.environment_available()
            if problem is None:
                return pause
            alert(log, "outage", f"step {step + 1}: waiting for the environment: {problem}")

    def _build(self, version: int, groups: list[Group], accounting: Accounting) -> StepBatch:
        began, algorithm = time.monotonic(), self._config.algorithm
        batch = build_data(groups, algorithm, version if self._config.rollout.max_staleness else None)
        built = time.monotonic()
        updates = [list(part) for part in split_batch(batch, self._config.policy.updates_per_batch, algorithm)]
        seconds = {
            "compute_advantages_and_returns": built - began,
            "convert_to_training_input": time.monotonic() - built,
        }
        return StepBatch(groups, batch, updates, accounting, staleness(groups, version), seconds)


def age(group: Group, version: int) -> int:
    """Return the weight versions between the oldest sampled token of ``group`` and ``version``."""
    return int(staleness([group], version).max(initial=0))


def staleness(groups: Sequence[Group], version: int) -> np.ndarray:
    """Return int64 ``[N]``: for each span of sampled tokens, weight versions between its sampling and ``version``."""
    ages = [age for group in groups for trajectory in group.trajectories for _, age in trajectory.ages(version)]
    return np.array(ages, np.int64)


@asynccontextmanager
async def _shown(plays: Sequence[_GroupPlay], show: ShowProgress, interval_s: float = 0.5) -> AsyncIterator[None]:
    """Show inside how many episodes of ``plays`` have ended."""

    async def watch() -> None:
        while True:
            show(sum(play.ended for play in plays))
            await asyncio.sleep(interval_s)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        show(sum(play.ended for play in plays))
