"""Training batches: a stream of groups, which are played by the rollout and turned into data.

The unit is the group: each is requested, counted and played again on its own, and is looked at when it comes back. As
many groups play as the batch needs, and ``rollout.batch.ahead`` batches more. Each is drawn for one step;
``rollout.batch.window`` says how many steps earlier or later it may be trained on, so that a batch need not wait for
its last episode. ``rollout.unfinished`` says what becomes of groups that still play when a batch is full,
``rollout.too_old`` of tokens that are older than ``rollout.max_staleness`` weight versions. A group without signal is
replaced by one of another task up to ``rollout.batch.max_replacements`` times.

With a window of 1, batches do not depend on which groups end first.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol, final

import numpy as np

from megatron_fleet.agents.trajectory import Group, Trajectory
from megatron_fleet.algorithms.advantages import has_signal, is_known
from megatron_fleet.algorithms.batch import AgeLimit, Batch, build_data, split_batch
from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.groups import shaped_rewards
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.data.sampler import Sampler, make_sampler
from megatron_fleet.data.task import Task
from megatron_fleet.platform.alerts import alert
from megatron_fleet.platform.timeline import Awaited
from megatron_fleet.rollout.collection import OnEpisode
from megatron_fleet.rollout.requests import Accounting, CollectRequest, CollectResult, RolloutFailed
from megatron_fleet.telemetry.episodes import trajectories_of, why_nothing_can_be_known, why_nothing_is_known

log = logging.getLogger(__name__)

FIRST_PROBE_S = 2.0
LONGEST_PROBE_S = 60.0
"""Most seconds between two probes of the environment in an outage; the pause doubles from ``FIRST_PROBE_S``."""

MOST_DRAWS = 4
"""Most draws from the sampler for the replacements of a step; where these lack an environment, another takes its place.
"""

MOST_AWAITED = 8
"""Most groups that are shown as those that a batch waits for."""

ShowProgress = Callable[[int, Sequence[Awaited]], None]
"""Shows how many episodes of a step have ended, and which groups it waits for."""
Beside = Callable[[], AbstractAsyncContextManager[None]]


class Episodes(Protocol):
    """The part of `rollout.service.RolloutService` that plays episodes."""

    async def collect(
        self,
        request: CollectRequest,
        on_episode: OnEpisode | None = None,
        stop: asyncio.Event | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> CollectResult: ...

    async def environment_available(self) -> str | None: ...


class Outage(UserError):
    """No reward became known for ``env.outage_limit_s``, or none can; the run can be resumed."""


@dataclass(slots=True)
class StepBatch:
    """Input of one training step.

    Attributes:
        groups: all groups that were played, in the order in which they were drawn.
        updates: data of each optimizer step; empty when no group had a signal.
        staleness: int64 ``[N]``: for each sampled span of tokens, weight versions between its sampling and now.
        seconds: durations by name, for ``timing/``.
        waits: shares of the time since the batch before, for ``async/``.
        stream: counts and ratios of the groups that were not waited for, for ``async/``.
    """

    groups: list[Group]
    batch: Batch
    updates: list[list[Datum]]
    accounting: Accounting
    staleness: np.ndarray
    seconds: dict[str, float] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    stream: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _GroupPlay:
    """One group: to be played, in play or back.

    Attributes:
        step, slot: the step that it was drawn for, and its place among the groups of that step.
        round: how often its task was replaced.
        work: its newest attempt; ``None`` before the first, and after one that was stopped.
        stop: ends that attempt.
        version: weight version of the engines when an episode of that attempt first had a place; ``None`` before.
        accounting: counts of its earlier attempts.
        kept: episodes of earlier attempts that are not played again, by sample.
        ended: episodes of the newest attempt that have ended.
        began: unix time at which it was first played.
        dropped: groups that it replaces.
    """

    step: int
    slot: int
    task: Task
    round: int = 0
    work: asyncio.Future[CollectResult] | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    version: int | None = None
    accounting: Accounting = field(default_factory=Accounting)
    kept: dict[int, Trajectory] = field(default_factory=dict)
    ended: int = 0
    began: float = 0.0
    dropped: list[Group] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.work is not None and self.work.done()

    @property
    def playing(self) -> bool:
        return self.work is not None and not self.work.done()

    def result(self) -> CollectResult:
        """Return the result of an attempt that is `done`; raises what it raised."""
        assert self.work is not None
        return self.work.result()

    def keep(self, result: CollectResult, dropped: Sequence[Trajectory], to: Literal["stale", "unfinished"]) -> None:
        """Keep what ``result`` has besides ``dropped``, which count as ``to`` and are played again."""
        gone = {t.sample for t in dropped}
        self.accounting += result.accounting.moved(dropped, to)
        self.kept = {t.sample: t for t in result.groups[0].trajectories if t.sample not in gone}


@final
class Batches:
    """Make batches from the sampler's tasks. After a resume (``state``, ``load``), groups that were drawn but not
    trained on come first; those that had ended are not played again."""

    def __init__(self, config: Config, tasks: Sequence[Task], rollout: Episodes) -> None:
        self._config, self._rollout = config, rollout
        self._size, self._rule = config.rollout.prompts_per_step, config.rollout.batch
        ahead = config.rollout.max_staleness if self._rule.ahead is None else self._rule.ahead
        self._ahead = round(ahead * self._size)
        # Where any group may come next, new ones are played as soon as a batch is taken, so that engines stay full.
        continues = config.rollout.unfinished == "continue" and config.rollout.max_staleness > 0
        self._refills = self._rule.window is None and continues
        self._draws = _Draws(make_sampler(tasks, self._size, config.run.seed, config.data.mixture), tasks, self._size)
        self._plays: list[_GroupPlay] = []
        self._version = 0  # of the engines, or the one before
        self._tokens = self._episodes = 0  # sampled tokens, and episodes, of all groups that came back
        self._trained: list[Group] = []
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self._taken: float | None = None

    async def next(self, step: int, show: ShowProgress, beside: Beside = nullcontext) -> StepBatch:
        """Return the batch of step ``step`` (from 0); the engines hold weight version ``step``.

        If it is cancelled, the groups of this batch are left for the next call.

        Args:
            beside: context that is entered when the step's groups are requested and left when the batch is full.

        Raises:
            Outage: no reward became known for too long, or none can.
            RolloutFailed: an engine or a worker died too often.
            EnvironmentFailed: the run's own environment server failed for too long.
        """
        began = time.monotonic()
        before = began if self._taken is None else self._taken
        self._version = step
        await self._stop([play for play in self._plays if self._will_be_too_old(play, step)], step)
        self._fill(step)
        async with beside(), self._shown(step, show):
            chosen = await self._complete(step)
        stream = self._stream(chosen)
        stream["unfinished_groups"] = await self._leave_unfinished(step)
        self._plays = [play for play in self._plays if play not in chosen]
        self._draws.forget({play.step for play in self._plays})
        if self._refills:
            self._fill(step + 1)
        self._taken = now = time.monotonic()
        waited, idle = now - began, self._take_idle(now)
        results = [play.result() for play in chosen]
        groups = [_numbered(result.groups[0], place) for place, result in enumerate(results)]
        self._trained = [group for play in chosen for group in (*play.dropped, *play.result().groups)]
        counts = (play.accounting + result.accounting for play, result in zip(chosen, results, strict=True))
        built = self._build(step, groups, sum(counts, start=Accounting()))
        generate = max(result.seconds for result in results)
        built.seconds |= {"generate": generate, "rollout_wait": waited, "engines_idle": idle}
        if passed := now - before:
            built.waits = {"trainer_waits_share": waited / passed, "engines_idle_share": idle / passed}
        built.stream = stream
        return built

    def trained(self) -> None:
        """Report the rewards of the newest batch to the sampler, and those of the groups that were replaced for it."""
        groups = self._trained
        self._draws.sampler.observe(
            (g.task_key, [t.reward for t in g.trajectories if is_known(t.reward)]) for g in groups
        )

    def status(self, groups: Sequence[Group]) -> dict[str, dict[str, float]]:
        """Return the status of the `data.sampler.Sampler`, plus ``mix``, each environment's share of ``groups``."""
        found, counts = self._draws.sampler.status(), Counter(group.env_key for group in groups)
        return {"mix": {env: counts[env] / max(len(groups), 1) for env in found["mix_total"]}, **found}

    def state(self) -> dict[str, Any]:
        """JSON-able state for `load`."""
        groups = [[play.step, play.slot, play.round, play.task.key] for play in self._plays]
        finished = {}
        for place, result in self._storable():
            counts = self._plays[place].accounting + result.accounting
            finished[str(place)] = {"accounting": asdict(counts), "seconds": result.seconds}
        back = {"tokens": self._tokens, "episodes": self._episodes}
        return {"groups": groups, "finished": finished, "back": back, **self._draws.state()}

    def finished(self) -> list[Trajectory]:
        """Episodes of the groups that came back and wait for their batch; ``group``: their places in `state`.

        Groups with images or expert routing, which files do not hold, are left out, as are those of an outage; they are
        played again.
        """
        return [replace(t, group=place) for place, result in self._storable() for t in result.groups[0].trajectories]

    def load(self, state: Mapping[str, Any], step: int, finished: Sequence[Trajectory] = ()) -> None:
        """Restore the result of `state`, saved after ``step`` steps, and of `finished`.

        Raises:
            UserError: it belongs to other tasks.
        """
        tasks = self._draws.load(state, step)
        back = state.get("back", {"tokens": 0, "episodes": 0})
        self._tokens, self._episodes = back["tokens"], back["episodes"]
        groups = state.get("groups", ())
        if state.get("size", self._size) != self._size:  # another rollout.prompts_per_step: they are drawn again
            self._draws.first([tasks[key] for *_, key in groups], step)
            groups, finished = (), ()
        self._plays = [_GroupPlay(at, slot, tasks[key], number) for at, slot, number, key in groups]
        episodes = defaultdict(list)
        for trajectory in finished:
            episodes[trajectory.group].append(trajectory)
        for place, found in episodes.items():
            play, noted = self._plays[place], state["finished"][str(place)]
            play.work = asyncio.get_running_loop().create_future()
            group = Group(place, play.task.key, play.task.env_key, found)
            play.work.set_result(CollectResult([group], Accounting(**noted["accounting"]), noted["seconds"]))

    async def close(self) -> None:
        """Cancel the running episodes. Idempotent."""
        works = [play.work for play in self._plays if play.work is not None]
        self._plays = []
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    def _fill(self, step: int) -> None:
        """Play the groups of the batch of ``step``, and those that may play ahead of it."""
        left = (self._config.run.last_step - step) * self._size
        wanted = min(self._size + self._ahead, left)
        while len(self._plays) < wanted:
            number, tasks = self._draws.next()
            self._plays += [_GroupPlay(number, slot, task) for slot, task in enumerate(tasks)]
        for play in self._plays[:wanted]:
            if play.work is None:
                self._start(play)

    def _start(self, play: _GroupPlay) -> None:
        """Play what a group has not kept of earlier attempts."""
        play.ended, play.version, play.stop = len(play.kept), None, asyncio.Event()
        play.work = asyncio.create_task(self._play(play))
        play.work.add_done_callback(self._returned)
        if self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    def _returned(self, _work: asyncio.Future[CollectResult]) -> None:
        if not any(play.playing for play in self._plays):
            self._idle_since = time.monotonic()

    def _take_idle(self, now: float) -> float:
        """Seconds from the last call until ``now`` during which no training episode was running."""
        idle = self._idle_s
        if self._idle_since is not None:
            idle += now - self._idle_since
            self._idle_since = now
        self._idle_s = 0.0
        return idle

    async def _play(self, play: _GroupPlay) -> CollectResult:
        """Play a group; one without signal is replaced as often as it may be."""
        while True:
            result = await self._collect(play)
            group = result.groups[0]
            new = [t for t in group.trajectories if t.sample not in play.kept]
            self._tokens += sum(int(np.count_nonzero(t.action_mask)) for t in new)
            self._episodes += len(new)
            if play.stop.is_set() or play.round == self._rule.max_replacements or not self._lacks_signal(group):
                return result
            play.accounting += result.accounting.moved(group.trajectories, "replaced")
            play.dropped.append(group)
            play.round, play.ended, play.kept = play.round + 1, 0, {}
            play.task = self._draws.replacement(play.step, play.slot, play.round)

    def _lacks_signal(self, group: Group) -> bool:
        """Whether advantages are 0, with at least one known reward; in an outage no task would help."""
        rewards = shaped_rewards(group, self._config.algorithm)
        return any(map(is_known, rewards)) and not has_signal(rewards)

    async def _collect(self, play: _GroupPlay) -> CollectResult:
        run, rollout = self._config.run, self._config.rollout
        place = play.slot + play.round * self._size  # of no other group of the step: a task may come twice
        request = CollectRequest(
            step=play.step,
            tasks=[play.task],
            samples=rollout.samples_per_prompt,
            temperature=rollout.sampling.temperature,
            purpose="train",
            seed=run.seed if run.deterministic else None,
            first=place,
            played={(place, sample): trajectory for sample, trajectory in play.kept.items()},
        )

        def ended(_: Trajectory) -> None:
            play.ended += 1

        def started() -> None:
            play.version, play.began = self._version, play.began or time.time()

        return await self._rollout.collect(request, ended, play.stop, started)

    async def _complete(self, step: int) -> list[_GroupPlay]:
        """Wait for a batch; while not one reward in it is known, wait for the environment and play all of it again.

        Raises:
            Outage: no reward became known for too long, or every attempt would end in the same way.
        """
        began, pause = None, FIRST_PROBE_S
        while True:
            chosen = await self._choose(step)
            trajectories = [t for play in chosen for t in trajectories_of(play.result().groups)]
            reason = why_nothing_is_known(trajectories)
            if reason is None:
                break
            if never := why_nothing_can_be_known(trajectories, self._config.rollout.max_context):
                raise Outage(f"step {step + 1}: {never}")
            alert(log, "outage", f"step {step + 1}: not one reward is known; most often {reason}")
            began = time.monotonic() if began is None else began
            pause = await self._wait_for_environment(step, reason, began, pause)
            for play in chosen:
                play.accounting += play.result().accounting.all_retried()
                play.kept = {}
                self._start(play)
        if stale := sum(play.accounting.stale > 0 for play in chosen):
            log.warning("step %d: %d groups were too old and were played again", step + 1, stale)
        return chosen

    def _eligible(self, step: int) -> list[_GroupPlay]:
        """Return the groups that the batch of ``step`` may have, in the order in which they were drawn."""
        window = self._rule.window
        last = None if window is None else (step // window + 1) * window
        return [play for play in self._plays if play.work is not None and (last is None or play.step < last)]

    @asynccontextmanager
    async def _shown(self, step: int, show: ShowProgress, interval_s: float = 0.5) -> AsyncIterator[None]:
        """Show inside how many episodes have ended of the groups that are furthest, and which groups play."""

        def now() -> None:
            plays = self._eligible(step)
            begun = [play for play in plays if play.playing and play.version is not None]
            samples = self._config.rollout.samples_per_prompt
            awaited = [
                Awaited(play.task.key, play.task.env_key, play.began, play.ended, samples)
                for play in sorted(begun, key=lambda play: play.began)[:MOST_AWAITED]
            ]
            show(sum(heapq.nlargest(self._size, (play.ended for play in plays))), awaited)

        async def watch() -> None:
            while True:
                now()
                await asyncio.sleep(interval_s)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            now()

    async def _choose(self, step: int) -> list[_GroupPlay]:
        """Wait until enough groups are back, and return the first of them in the order in which they were drawn.

        Raises:
            RolloutFailed: an engine samples with weights that are too old.
        """
        while True:
            eligible = self._eligible(step)
            for play in eligible:
                if play.done:
                    self._judge(play, step)
            done = [play for play in eligible if play.done]
            if len(done) >= self._size:
                return done[: self._size]
            await asyncio.wait(_works(eligible), return_when=asyncio.FIRST_COMPLETED)

    def _judge(self, play: _GroupPlay, version: int) -> None:
        """Play those episodes of a group again that are too old.

        Raises:
            RolloutFailed: an engine samples with weights that are too old.
        """
        most, result = self._config.rollout.max_staleness, play.result()
        old = [t for t in result.groups[0].trajectories if oldest(t, version) > most]
        if not old or self._config.rollout.too_old != "again":
            return
        if play.version == version and play.accounting.stale:
            raise RolloutFailed(
                f"step {version + 1}: an engine samples with weights that are "
                f"{max(oldest(t, version) for t in old)} versions old although it was given version {version}."
            )
        play.keep(result, old, "stale")
        self._start(play)

    def _will_be_too_old(self, play: _GroupPlay, version: int) -> bool:
        """Whether a group in play began with weights so old that some of it would be played again."""
        rollout = self._config.rollout
        if rollout.too_old != "again" or not play.playing or play.version is None:
            return False
        return version - play.version > rollout.max_staleness

    async def _leave_unfinished(self, step: int) -> int:
        """Do with the groups that still play what ``rollout.unfinished`` says; returns how many had a place."""
        playing = [play for play in self._plays if play.playing]
        begun = sum(play.version is not None for play in playing)
        match self._config.rollout.unfinished:
            case "wait" if playing:
                await asyncio.wait(_works(playing))
            case "again":
                await self._stop(playing, step + 1)
        return begun

    async def _stop(self, plays: Sequence[_GroupPlay], version: int) -> None:
        """Stop groups, which are played again later. Their episodes with a known reward are kept, unless they will be
        too old for weight version ``version``.

        Raises:
            RolloutFailed: an engine or a worker died too often.
        """
        for play in plays:
            play.stop.set()
        await asyncio.gather(*_works(plays))
        for play in plays:
            result = play.result()
            lost = [t for t in result.groups[0].trajectories if not is_known(t.reward)]
            play.keep(result, lost, "unfinished")
            old = [t for t in play.kept.values() if oldest(t, version) > self._config.rollout.max_staleness]
            if self._config.rollout.too_old == "again" and old:
                play.accounting = play.accounting.moved(old, "stale")
                for trajectory in old:
                    del play.kept[trajectory.sample]
            play.work = None

    def _stream(self, chosen: Sequence[_GroupPlay]) -> dict[str, float]:
        """Metrics of what was not waited for, by which a batch's bias to short episodes is seen, and what that cost."""
        waiting = [(play.step, play.slot) for play in self._plays if play.playing]
        overtaking = [play for play in chosen if waiting and (play.step, play.slot) > min(waiting)]
        episodes = [t for play in chosen for t in play.result().groups[0].trajectories]
        found: dict[str, float] = {
            "overtaking_share": len(overtaking) / len(chosen),
            "replaced_groups": sum(play.round for play in chosen),
            "interrupted_episodes": sum("interruptions" in t.metrics for t in episodes),
            "recomputed_tokens": sum(t.metrics.get("recomputed_tokens", 0) for t in episodes),
        }
        if self._tokens:
            mean = self._tokens / self._episodes
            found["length_ratio"] = float(np.mean([np.count_nonzero(t.action_mask) for t in episodes])) / mean
        return found

    def _storable(self) -> list[tuple[int, CollectResult]]:
        """Results whose episodes a file can hold, some with a known reward, with their places in `state`."""
        found = []
        for place, play in enumerate(self._plays):
            work = play.work
            if play.stop.is_set() or work is None:
                continue  # stopped, and not replaced yet
            if work.done() and not work.cancelled() and work.exception() is None:
                result = work.result()
                episodes = result.groups[0].trajectories
                whole = not any(t.image_spans or t.routing is not None for t in episodes)
                if whole and any(is_known(t.reward) for t in episodes):
                    found.append((place, result))
        return found

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
        began, algorithm, rollout = time.monotonic(), self._config.algorithm, self._config.rollout
        limit = None if rollout.too_old == "again" else AgeLimit(rollout.max_staleness, rollout.too_old == "drop")
        batch = build_data(groups, algorithm, version if self._ahead or rollout.max_staleness else None, limit)
        built = time.monotonic()
        updates = [list(part) for part in split_batch(batch, self._config.policy.updates_per_batch, algorithm)]
        seconds = {
            "compute_advantages_and_returns": built - began,
            "convert_to_training_input": time.monotonic() - built,
        }
        return StepBatch(groups, batch, updates, accounting, staleness(groups, version), seconds)


class _Draws:
    """Tasks in the order in which they are played: those of each step, and those that replace some of them.

    Which task replaces which depends on neither time nor other replacements, so that equal seeds give equal batches.

    Attributes:
        sampler: where they come from.
    """

    def __init__(self, sampler: Sampler, tasks: Sequence[Task], size: int) -> None:
        """Args: ``size``: groups of a step."""
        self.sampler, self._size = sampler, size
        self._by_key = {task.key: task for task in tasks}
        self._drawn = 0
        self._first: list[Task] = []
        self._spare: list[Task] = []
        self._environments: dict[int, list[str]] = {}
        self._rounds: dict[tuple[int, int], list[Task | None]] = {}

    def next(self) -> tuple[int, list[Task]]:
        """Return the number of the next step, and its tasks."""
        while len(self._first) < self._size:
            self._first += self.sampler.next()
        tasks, self._first = self._first[: self._size], self._first[self._size :]
        number, self._drawn = self._drawn, self._drawn + 1
        self._environments[number] = [task.env_key for task in tasks]
        return number, tasks

    def replacement(self, step: int, slot: int, number: int) -> Task:
        """Return the task of replacement ``number`` (from 1) of a slot: of the same environment where there is one."""
        if (step, number) not in self._rounds:
            wanted = self._environments[step]
            for _ in range(MOST_DRAWS):
                if not Counter(wanted) - Counter(task.env_key for task in self._spare):
                    break
                self._spare += self.sampler.next()
            self._rounds[step, number], self._spare = _matched(wanted, self._spare)
        row = self._rounds[step, number]
        task, row[slot] = row[slot], None
        assert task is not None, "a slot is replaced once in each round"
        return task

    def forget(self, steps: Collection[int]) -> None:
        """Give back what was not needed for other steps than ``steps``."""
        for step, number in sorted(self._rounds.keys()):
            if step not in steps:
                self._spare += [task for task in self._rounds.pop((step, number)) if task is not None]
        for step in [step for step in self._environments if step not in steps]:
            del self._environments[step]

    def first(self, tasks: Iterable[Task], step: int) -> None:
        """Let these be drawn next, for step ``step`` and those after it."""
        self._first, self._drawn = [*tasks, *self._first], step
        self._rounds.clear()

    def state(self) -> dict[str, Any]:
        """JSON-able state for `load`."""
        rounds = [[*at, [task and task.key for task in row]] for at, row in self._rounds.items()]
        return {
            "sampler": self.sampler.state_dict(),
            "size": self._size,
            "drawn": self._drawn,
            "first": [task.key for task in self._first],
            "spare": [task.key for task in self._spare],
            "environments": [[step, names] for step, names in self._environments.items()],
            "rounds": rounds,
        }

    def load(self, state: Mapping[str, Any], step: int) -> Mapping[str, Task]:
        """Restore the result of `state`, saved after ``step`` steps; returns the tasks by key.

        Raises:
            UserError: it belongs to other tasks.
        """
        self.sampler.load_state_dict(state["sampler"])
        named = self._by_key
        self._drawn = int(state.get("drawn", step))
        pending = [key for keys in state.get("pending", ()) for key in keys]  # of checkpoints of before
        self._first = [named[key] for key in (*pending, *state.get("first", ()))]
        self._spare = [named[key] for key in state.get("spare", ())]
        self._environments = {at: list(names) for at, names in state.get("environments", ())}
        rows = state.get("rounds", ())
        self._rounds = {(at, number): [key and named[key] for key in keys] for at, number, keys in rows}
        return named


def _matched(environments: Sequence[str], tasks: Sequence[Task]) -> tuple[list[Task | None], list[Task]]:
    """Return a task for each of ``environments``, of that environment as far as there are such, and what is left."""
    left = list(tasks)
    chosen: list[Task | None] = []
    for name in environments:
        same = next((task for task in left if task.env_key == name), None)
        chosen.append(same)
        if same is not None:
            left.remove(same)
    return [left.pop(0) if task is None else task for task in chosen], left


def _works(plays: Iterable[_GroupPlay]) -> list[asyncio.Future[CollectResult]]:
    """Attempts that have not ended."""
    return [play.work for play in plays if play.work is not None and not play.work.done()]


def _numbered(group: Group, place: int) -> Group:
    """Return a group as number ``place`` of its batch."""
    for trajectory in group.trajectories:
        trajectory.group = place
    return replace(group, index=place)


def oldest(trajectory: Trajectory, version: int) -> int:
    """Return the weight versions between the oldest sampled token of ``trajectory`` and ``version``."""
    return max((age for _, age in trajectory.ages(version)), default=0)


def staleness(groups: Sequence[Group], version: int) -> np.ndarray:
    """Return int64 ``[N]``: for each span of sampled tokens, weight versions between its sampling and ``version``."""
    ages = [age for group in groups for trajectory in group.trajectories for _, age in trajectory.ages(version)]
    return np.array(ages, np.int64)
