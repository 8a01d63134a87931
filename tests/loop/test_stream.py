"""Batches as a stream of groups: which groups a batch has, what becomes of the others, and what a resume keeps."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from fake_rollout import FakeRollout
from waiting import LOOP_TIME, in_simulated_time

from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.algorithms.batch import Fate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.validate import check
from megatron_fleet.loop import batches
from megatron_fleet.loop.batches import Batches
from megatron_fleet.loop.run_tasks import load_data

SIZE, SAMPLES = 4, 4
OVERRIDES = (
    "experiment=quickstart", f"rollout.prompts_per_step={SIZE}", f"rollout.samples_per_prompt={SAMPLES}",
    "run.steps=6", "algorithm=importance_weighted", "algorithm.group_filter=none",
)  # fmt: skip


class Stream:
    """A run of batches without a trainer: after each, the engines get the next version.

    Attributes:
        took: seconds that each batch was waited for.
        between: seconds of each update.
        shown: episodes that had ended, and groups that were waited for, from time to time.
    """

    def __init__(self, tmp_path, *overrides, delay=lambda request: 1.0):
        self.config = load([*OVERRIDES, f"run.out={tmp_path}", *overrides])
        self.tasks = load_data(self.config)[0]
        self.rollout = FakeRollout(16)
        self.rollout.delay_of = delay
        self.batches = Batches(self.config, self.tasks, self.rollout)
        self.step, self.took, self.between, self.shown = 0, [], 1.0, []

    async def take(self):
        began = asyncio.get_running_loop().time()
        batch = await self.batches.next(self.step, lambda *shown: self.shown.append(shown))
        self.took.append(asyncio.get_running_loop().time() - began)
        await asyncio.sleep(self.between)
        self.batches.trained()
        self.step += 1
        self.rollout.engines.version = self.step
        return batch

    async def all(self):
        try:
            return [await self.take() for _ in range(self.config.run.steps - self.step)]
        finally:
            await self.batches.close()

    def resumed(self, tmp_path):
        """The same run after a restart of everything, from what a checkpoint holds."""
        other = Stream(tmp_path, delay=self.rollout.delay_of)
        other.config, other.step = self.config, self.step
        other.batches = Batches(self.config, self.tasks, other.rollout)
        other.rollout.engines.version = self.step
        other.batches.load(json.loads(json.dumps(self.batches.state())), self.step, self.batches.finished())
        return other


@pytest.fixture(autouse=True)
def simulated_clock(monkeypatch):
    monkeypatch.setattr(batches, "time", LOOP_TIME)


def slow(*places, seconds=10.0):
    """``seconds`` for groups at these (step, place), 1 s for others."""
    return lambda request: seconds if (request.step, request.first) in places else 1.0


def keys(batch):
    return [group.task_key for group in batch.groups]


def check_counts(made):
    """Every episode that was started ended once, and every batch is whole."""
    for batch in made:
        counts = batch.accounting
        counts.check(SIZE * SAMPLES)
        assert [group.index for group in batch.groups] == list(range(SIZE))
        assert {t.group for t in batch.groups[2].trajectories} == {2}
        assert sum(batch.batch.counts.values()) == SIZE * SAMPLES


def drawn(tmp_path):
    """The tasks of each step as they are drawn, without any rule."""
    sampler = Stream(tmp_path).batches._draws.sampler
    return [[task.key for task in sampler.next()] for _ in range(6)]


@in_simulated_time
async def test_with_a_window_of_one_batches_are_what_was_drawn_whatever_ends_first(tmp_path):
    plain = await Stream(tmp_path).all()
    ahead = Stream(tmp_path, "rollout.max_staleness=1", delay=slow((0, 1), (3, 2)))
    made = await ahead.all()
    assert [keys(b) for b in made] == [keys(b) for b in plain] == drawn(tmp_path)
    assert ahead.took == [10.0, 0.0, 0.0, 9.0, 0.0, 0.0]
    assert all(b.stream["overtaking_share"] == 0 for b in made)
    check_counts([*plain, *made])


@in_simulated_time
async def test_a_batch_does_not_wait_for_a_long_group(tmp_path):
    """It is trained on later, with the same weights' version as it was sampled with, and everything once."""
    late = slow((0, 1), seconds=4.5)
    stream = Stream(
        tmp_path, "rollout.batch.window=null", "rollout.batch.ahead=0.5", "rollout.max_staleness=4", delay=late
    )
    made = await stream.all()
    check_counts(made)
    assert Counter(key for b in made for key in keys(b)) == Counter(key for step in drawn(tmp_path) for key in step)
    long = drawn(tmp_path)[0][1]
    assert stream.took[0] == 1.0 and long not in keys(made[0])
    (at,) = [step for step, b in enumerate(made) if long in keys(b)]
    assert at == 4 and made[at].staleness.max() == 4
    assert stream.took[1:] == [0.0] * 5  # new groups are played during updates, which take a second
    assert made[0].stream["unfinished_groups"] == 1 and made[0].stream["overtaking_share"] == 0.75


@in_simulated_time
async def test_a_group_gets_old_from_its_first_place_on(tmp_path):
    """As long as it only waits for one, it is not stopped and not shown."""
    ahead = ("rollout.batch.window=null", "rollout.batch.ahead=0.5", "rollout.max_staleness=1")
    stream = Stream(tmp_path, *ahead, delay=slow((0, 1), (0, 2), seconds=100.0))
    played, waits = stream.rollout.collect, asyncio.Event()

    async def collect(request, on_episode=None, stop=None, on_start=None):
        if (request.step, request.first) == (0, 1):
            await waits.wait()
        return await played(request, on_episode, stop, on_start)

    stream.rollout.collect = collect
    first = [await stream.take() for _ in range(2)]
    assert stream.shown[-1][1] and not any(one.name == drawn(tmp_path)[0][1] for one in stream.shown[-1][1])
    stream.rollout.delay_of = lambda request: 1.0
    third = await stream.take()  # the other long group is too old for it, and is restarted
    waits.set()
    made = [*first, third, *await stream.all()]
    check_counts(made)
    counts = {key: b.accounting.unfinished for b in made for key in keys(b) if key in drawn(tmp_path)[0][1:3]}
    assert sum(b.accounting.unfinished for b in made) == SAMPLES and len(counts) == 2


@in_simulated_time
async def test_the_groups_that_a_batch_waits_for_are_shown(tmp_path):
    stream = Stream(tmp_path, delay=slow((0, 1), (0, 3), seconds=5.0))
    await stream.take()
    await stream.batches.close()
    step = drawn(tmp_path)[0]
    (ended, first), (_, later), (done, none) = stream.shown[1], stream.shown[5], stream.shown[-1]
    assert [one.name for one in first] == step and {(one.done, one.total) for one in first} == {(0, SAMPLES)}
    assert [one.name for one in later] == [step[1], step[3]] and none == []
    assert (ended, done) == (0, SIZE * SAMPLES)


@in_simulated_time
async def test_a_group_is_trained_on_within_its_window(tmp_path):
    """The second batch of a window takes the rest, and the next window begins after it."""
    stream = Stream(tmp_path, "rollout.batch.window=2", "rollout.max_staleness=1", delay=slow((0, 1), (3, 0)))
    made = await stream.all()
    check_counts(made)
    steps = drawn(tmp_path)
    for window in (0, 2, 4):
        assert sorted(keys(made[window]) + keys(made[window + 1])) == sorted(steps[window] + steps[window + 1])
    assert steps[0][1] in keys(made[1]) and steps[3][0] in keys(made[3])
    assert stream.took[:2] == [1.0, 8.0]


OVERSAMPLED = ("rollout.batch.window=null", "rollout.batch.ahead=0.5", "rollout.unfinished=again")


@in_simulated_time
async def test_what_still_plays_when_the_batch_is_full_is_stopped_and_played_again(tmp_path):
    """Over-sampling without stale tokens: environments are closed, and the tasks are not lost."""
    stream = Stream(tmp_path, *OVERSAMPLED, delay=slow((0, 1), (0, 2)))
    first = await stream.take()
    assert stream.rollout.under_way == 0, "really stopped"
    assert first.stream["unfinished_groups"] == 2
    stream.rollout.delay_of = lambda request: 1.0
    made = [first, *await stream.all()]
    check_counts(made)
    assert Counter(key for b in made for key in keys(b)) == Counter(key for step in drawn(tmp_path) for key in step)
    assert [b.staleness.max() for b in made] == [0] * 6
    again = {key: b.accounting.unfinished for b in made for key in keys(b) if key in (drawn(tmp_path)[0][1:3])}
    assert sum(b.accounting.unfinished for b in made) == 2 * SAMPLES and set(again.values()) == {2 * SAMPLES}


@in_simulated_time
async def test_an_update_waits_for_what_still_plays(tmp_path):
    stream = Stream(tmp_path, "rollout.max_staleness=1", "rollout.unfinished=wait", delay=slow((1, 3)))
    made = await stream.all()
    check_counts(made)
    assert stream.took[:2] == [10.0, 1.0]  # all that played is there, and the next step's groups are played
    assert [len({s.weight_version for g in b.groups for t in g.trajectories for s in t.spans[1:]}) for b in made] == [
        1
    ] * 6


def two_of_four_end(rollout):
    """Of the group that is stopped."""
    played = rollout.collect

    async def collect(request, *how):
        result = await played(request, *how)
        if (request.step, request.first) == (0, 1) and not request.played:
            for trajectory in result.groups[0].trajectories[:2]:
                trajectory.reward, trajectory.outcome = 0.5, Outcome.COMPLETED
            result.accounting.known, result.accounting.unknown = 2, 2
        return result

    rollout.collect = collect


@in_simulated_time
async def test_episodes_that_ended_in_time_are_kept_when_their_group_is_stopped(tmp_path):
    """With a bound of 1 they may be trained on after the next update; the others are played again."""
    stream = Stream(tmp_path, *OVERSAMPLED, "rollout.max_staleness=1", delay=slow((0, 1)))
    two_of_four_end(stream.rollout)
    first = await stream.take()
    stream.rollout.delay_of = lambda request: 1.0
    made = [first, *await stream.all()]
    check_counts(made)
    long = drawn(tmp_path)[0][1]
    ((at, group),) = [(b, g) for b in made for g in b.groups if g.task_key == long]
    assert [t.reward == 0.5 for t in group.trajectories] == [True, True, False, False]
    assert (at.accounting.unfinished, at.accounting.started) == (2, SIZE * SAMPLES + 2)


@in_simulated_time
async def test_a_stopped_group_keeps_nothing_that_will_be_too_old(tmp_path):
    """Otherwise it would be restarted a second time, once all of it is there."""
    stream = Stream(tmp_path, *OVERSAMPLED, delay=slow((0, 1)))
    two_of_four_end(stream.rollout)
    first = await stream.take()
    stream.rollout.delay_of = lambda request: 1.0
    made = [first, *await stream.all()]
    check_counts(made)
    long = drawn(tmp_path)[0][1]
    _, again = [request for request in stream.rollout.requests if request.tasks[0].key == long]
    assert again.played == {}
    (counts,) = [b.accounting for b in made if long in keys(b)]
    assert counts.stale >= 2 and counts.unfinished >= 2


@pytest.mark.parametrize(("rule", "fates"), [("mask", 0), ("drop", SAMPLES)])
@in_simulated_time
async def test_tokens_that_are_too_old_have_no_gradient(tmp_path, rule, fates):
    """Of a group that was sampled half before an update and half after it: its older half, or all of it."""
    stream = Stream(
        tmp_path, "rollout.batch.window=null", "rollout.batch.ahead=0.25", f"rollout.too_old={rule}",
        delay=slow((0, 1), seconds=10.5),
    )  # fmt: skip
    played = stream.rollout.collect

    async def across(request, *how):
        before = stream.rollout.engines.version
        result = await played(request, *how)
        for t in result.groups[0].trajectories:
            prompt, action = t.spans
            middle = (action.start + action.end) // 2
            halves = ((action.start, middle, before), (middle, action.end, stream.rollout.engines.version))
            t.spans = (prompt, *(batches.replace(action, start=a, end=b, weight_version=v) for a, b, v in halves))
        return result

    stream.rollout.collect = across
    made = await stream.all()
    check_counts(made)
    long = drawn(tmp_path)[0][1]
    ((step, place),) = [(s, keys(b).index(long)) for s, b in enumerate(made) if long in keys(b)]
    assert step == 5 and made[step].batch.counts[Fate.TOO_OLD] == fates
    masks = [
        d.loss_mask for d, origin in zip(made[step].batch.data, made[step].batch.origin, strict=True)
        if origin.group == place
    ]  # fmt: skip
    assert len(masks) == SAMPLES - fates
    for mask in masks:
        assert mask.tolist() == [False] * 5 + [True] * 3


@in_simulated_time
async def test_groups_without_signal_are_replaced_by_tasks_of_the_same_environment(tmp_path):
    """Whatever ends first, equal runs replace the same groups by the same tasks."""
    dull = {task.key for task in Stream(tmp_path).tasks if int(task.key[-4:]) % 3 == 0}
    orders = []
    for delay in (lambda request: 1.0, lambda request: 5.0 - request.first % 5):
        stream = Stream(tmp_path, "rollout.batch.max_replacements=9", delay=delay)
        played, seen = stream.rollout.collect, []

        async def without_signal(request, *how, played=played, seen=seen):
            result = await played(request, *how)
            seen.append((request.step, request.first))
            for t in result.groups[0].trajectories:
                t.reward = 1.0 if t.task_key in dull else t.sample / SAMPLES
            return result

        stream.rollout.collect = without_signal
        made = await stream.all()
        check_counts(made)
        assert len(set(seen)) == len(seen), "no two groups have the same seeds"
        assert not dull & {key for b in made for key in keys(b)}
        assert all(b.accounting.replaced == b.stream["replaced_groups"] * SAMPLES > 0 for b in made)
        firsts = [r.tasks[0].env_key for r in stream.rollout.requests if r.first < SIZE]
        assert [g.env_key for b in made for g in b.groups] == firsts
        orders.append([keys(b) for b in made])
    assert orders[0] == orders[1]
    given = [request.tasks[0].key for request in stream.rollout.requests]
    assert len(set(given)) == len(given) and stream.batches._draws.state()["rounds"] == []


@in_simulated_time
async def test_a_task_that_stays_without_signal_is_given_up_after_as_many_replacements_as_allowed(tmp_path):
    stream = Stream(tmp_path, "rollout.batch.max_replacements=2", "run.steps=2")
    played = stream.rollout.collect

    async def all_right(request, *how):
        result = await played(request, *how)
        for t in result.groups[0].trajectories:
            t.reward = 1.0
        return result

    stream.rollout.collect = all_right
    made = await stream.all()
    check_counts(made)
    assert [b.accounting.replaced for b in made] == [2 * SIZE * SAMPLES] * 2
    assert stream.took == [3.0, 3.0]


@in_simulated_time
async def test_groups_of_an_outage_are_not_replaced(tmp_path):
    stream = Stream(tmp_path, "rollout.batch.max_replacements=2", "run.steps=1")
    stream.rollout.unknown = {0}
    (batch,) = await stream.all()
    assert (batch.accounting.replaced, batch.accounting.retried) == (0, SIZE * SAMPLES)


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.max_staleness=0",),
        ("rollout.max_staleness=2",),
        OVERSAMPLED,
        ("rollout.batch.window=2", "rollout.max_staleness=1", "rollout.batch.max_replacements=1"),
    ],
)
@in_simulated_time
async def test_after_a_restart_no_task_is_lost_and_what_had_come_back_is_kept(tmp_path, overrides):
    whole = Stream(tmp_path, *overrides, delay=slow((1, 1), (3, 2)))
    expected = await whole.all()
    cut = Stream(tmp_path, *overrides, delay=slow((1, 1), (3, 2)))
    made = [await cut.take() for _ in range(2)]
    back = {(play.step, play.slot) for play in cut.batches._plays if play.done}
    later = cut.resumed(tmp_path)
    await cut.batches.close()
    made += await later.all()
    check_counts(made)
    again = {(request.step, request.first) for request in later.rollout.requests}
    if cut.config.rollout.max_staleness:  # otherwise they are too old for the next step
        assert not again & back
    assert Counter(key for b in made for key in keys(b)) == Counter(key for b in expected for key in keys(b))
    if later.config.rollout.batch.window == 1:
        assert [keys(b) for b in made] == [keys(b) for b in expected]
        ids = [
            [[t.token_ids.tolist() for g in b.groups for t in g.trajectories] for b in run] for run in (made, expected)
        ]
        assert ids[0][0] == ids[1][0]


@in_simulated_time
async def test_a_group_that_is_being_stopped_is_not_kept_as_it_is(tmp_path):
    """A run may be asked to end while it stops groups."""
    stream = Stream(tmp_path, *OVERSAMPLED, "rollout.max_staleness=1", delay=slow((0, 1)))
    two_of_four_end(stream.rollout)
    stop, stopping = stream.batches._stop, asyncio.Event()

    async def interrupted(plays, version):
        if plays:
            for play in plays:
                play.stop.set()
            await asyncio.wait([play.work for play in plays])
            stopping.set()
            await asyncio.sleep(3600)
        await stop(plays, version)

    stream.batches._stop = interrupted
    taking = asyncio.create_task(stream.take())
    await stopping.wait()
    taking.cancel()
    await asyncio.wait([taking])
    later = stream.resumed(tmp_path)
    await stream.batches.close()
    later.rollout.delay_of = lambda request: 1.0
    made = await later.all()
    check_counts(made)
    assert not any(t.outcome is Outcome.ABORTED for b in made for g in b.groups for t in g.trajectories)


@in_simulated_time
async def test_a_full_batch_that_is_not_taken_is_in_the_next_checkpoint(tmp_path):
    """A run may be asked to end while a full batch waits for other groups, or for an evaluation."""
    late = slow((0, 1), seconds=100.0)
    modes = (
        "rollout.batch.window=null",
        "rollout.batch.ahead=0.5",
        "rollout.max_staleness=1",
        "rollout.unfinished=wait",
    )
    stream = Stream(tmp_path, *modes, delay=late)
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(50)
    taking.cancel()
    await asyncio.wait([taking])
    later = stream.resumed(tmp_path)
    await stream.batches.close()
    made = await later.all()
    check_counts(made)
    assert Counter(key for b in made for key in keys(b)) == Counter(key for step in drawn(tmp_path) for key in step)
    again = [(request.step, request.first) for request in later.rollout.requests]
    assert (0, 1) in again and (0, 0) not in again


@in_simulated_time
async def test_a_checkpoint_of_before_is_resumed(tmp_path):
    """It names the tasks that were handed out and not trained on, by step."""
    sampler = Stream(tmp_path).batches._draws.sampler
    steps = [[task.key for task in sampler.next()] for _ in range(4)]
    stream = Stream(tmp_path, "rollout.max_staleness=1")
    stream.step = stream.rollout.engines.version = 2
    stream.batches.load({"sampler": sampler.state_dict(), "pending": steps[2:]}, 2)
    made = await stream.all()
    assert [keys(b) for b in made] == drawn(tmp_path)[2:]
    assert [request.step for request in stream.rollout.requests[::SIZE]] == [2, 3, 4, 5]


@in_simulated_time
async def test_a_run_may_go_on_with_more_groups_in_a_step(tmp_path):
    cut = Stream(tmp_path, "rollout.max_staleness=1")
    made = [await cut.take() for _ in range(2)]
    state, finished = json.loads(json.dumps(cut.batches.state())), cut.batches.finished()
    await cut.batches.close()
    wider = Stream(tmp_path, "rollout.max_staleness=1", "rollout.prompts_per_step=6", "run.steps=4")
    wider.step = wider.rollout.engines.version = 2
    wider.batches.load(state, 2, finished)
    made += await wider.all()
    order = [key for step in drawn(tmp_path) for key in step][: 2 * SIZE + 12]
    assert [key for b in made for key in keys(b)] == order


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("rollout.batch.window=null",), r"rollout\.batch\.window=null .* raise rollout\.batch\.ahead"),
        (
            ("rollout.batch.ahead=0.5", "rollout.batch.window=null"),
            r"rollout\.batch\.ahead=0\.5 with .* set rollout\.unf",
        ),
    ],
)
def test_rules_that_cannot_work_are_refused(tmp_path, overrides, sentence):
    with pytest.raises(UserError, match=sentence):
        check(load([*OVERRIDES, f"run.out={tmp_path}", *overrides]))
