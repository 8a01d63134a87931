"""Which tasks are evaluated, what a budget leaves out, and evaluations in the background, against a real collection."""

import asyncio
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

pytest.importorskip("hydra")

from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.evaluator import FEW_TASKS, Evaluator, choose, notes
from megatron_fleet.rollout.collection import Collection
from megatron_fleet.rollout.requests import Accounting, CollectRequest, EpisodeSpec

TINY = ("experiment=quickstart",)


def tasks(**counts: int) -> list[Task]:
    return [Task(f"{env}-{i}", "p", env, "") for env, count in counts.items() for i in range(count)]


def played(spec: EpisodeSpec, reward: float | None = 1.0, outcome: Outcome = Outcome.COMPLETED) -> Trajectory:
    mask, tokens = np.array([False, True]), np.array([1, 2], np.int32)
    spans = (Span("prompt", 0, 1, 0), Span("action", 1, 2, 0, 7))
    key, env, none = spec.task.key, spec.task.env_key, np.zeros(2, np.float32)
    return Trajectory(key, env, spec.group, spec.sample, tokens, mask, none, spans, reward, "", outcome)


ENVIRONMENTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=30)


@given(ENVIRONMENTS, st.integers(1, 35))
def test_the_choice_is_even_stable_and_in_order(environments, limit):
    rows = [Task(f"t{i}", "p", env, "") for i, env in enumerate(environments)]
    chosen = choose(rows, limit)
    assert len(chosen) == min(limit, len(rows))
    assert [rows.index(task) for task in chosen] == sorted(rows.index(task) for task in chosen)
    assert set(chosen_keys(chosen)) <= set(chosen_keys(choose(rows, limit + 1)))
    assert set(chosen_keys(chosen)) == set(chosen_keys(choose(rows[::-1], limit)))
    left = Counter(environments) - Counter(task.env_key for task in chosen)
    counts = Counter(task.env_key for task in chosen)
    for env in left:  # an environment with tasks left has no more than one fewer than any other
        assert counts[env] >= max(counts.values()) - 1


@given(ENVIRONMENTS)
def test_no_limit_leaves_nothing_out(environments):
    rows = [Task(f"t{i}", "p", env, "") for i, env in enumerate(environments)]
    assert choose(rows, None) == rows


def test_what_is_left_out_is_told():
    rows = [Task(f"{env}-{i}", f"Close the ticket {env * 3}{i} now.", env, "") for env in "ab" for i in range(9)]
    assert notes(rows, rows) == []
    assert notes(choose(rows, 10), rows) == ["10 of 18 evaluation tasks are played (eval.tasks)."]


def test_environments_with_few_different_tasks_are_named():
    """Fleet's ticketmaster once had 28 evaluation tasks, all of them nearly the same."""
    words = "please buy two tickets for the concert of the band that plays in the old hall on friday evening number"
    same = [Task(f"s{i}", f"{words} {i}", "ticketmaster", "") for i in range(28)]
    different = [Task(f"g{i}", f"close issue {i} of the {i}th repository", "github", "") for i in range(FEW_TASKS)]
    (note,) = notes([*same, *different], [*same, *different])
    assert "fewer than 5 different evaluation tasks" in note and note.endswith(": ticketmaster 1 of 28.")
    (note,) = notes([*same, *different[1:]], [*same, *different[1:]])
    assert note.endswith(": github 4 of 4, ticketmaster 1 of 28.")


def chosen_keys(rows: list[Task]) -> list[str]:
    return [task.key for task in rows]


def request(rows: list[Task], samples: int = 2, **changes) -> CollectRequest:
    return replace(CollectRequest(0, rows, samples, 1.0, "eval", 5), **changes)


def test_an_evaluation_begins_every_task_before_any_again_and_environments_by_turns():
    specs = Collection(request(tasks(b=3, a=1)), 0).take(99)
    assert [(s.task.key, s.sample) for s in specs] == [
        *(("a-0", 0), ("b-0", 0), ("b-1", 0), ("b-2", 0)),
        *(("a-0", 1), ("b-0", 1), ("b-1", 1), ("b-2", 1)),
    ]
    trained = Collection(request(tasks(b=2), purpose="train"), 0).take(99)
    assert [(s.task.key, s.sample) for s in trained] == [("b-0", 0), ("b-0", 1), ("b-1", 0), ("b-1", 1)]


FATES = st.lists(st.sampled_from(["known", "unknown", "aborted", "lost"]), max_size=40)


@given(FATES, FATES, st.integers(1, 4), st.integers(1, 3), st.integers(0, 12))
def test_a_stopped_collection_returns_every_episode_and_adds_up(before, after, count, samples, under_way):
    collection = Collection(request(tasks(a=count), samples), max_retries=1)
    for fate in before:
        for spec in collection.take(1):
            give_back(collection, spec, fate)
    open_specs = collection.take(under_way)
    waiting = collection.waiting
    collection.stop("the budget was over")
    assert collection.take(99) == []
    for spec, fate in zip(open_specs, after + ["known"] * len(open_specs), strict=False):
        give_back(collection, spec, fate)
    assert collection.done
    result = collection.result(1.0)
    assert result.accounting.unstarted == waiting
    kept = [t for g in result.groups for t in g.trajectories]
    assert len(kept) == count * samples
    assert all((t.reward is None) == (t.outcome is not Outcome.COMPLETED) for t in kept)


def give_back(collection: Collection, spec: EpisodeSpec, fate: str) -> None:
    match fate:
        case "known":
            collection.ended(spec, played(spec))
        case "unknown":
            collection.ended(spec, played(spec, None, Outcome.VERIFIER_FAILED))
        case "aborted":
            collection.ended(spec, played(spec, None, Outcome.ABORTED))
        case "lost":
            collection.lost(spec)


def test_what_a_budget_cut_off_names_it():
    collection = Collection(request(tasks(a=1)), max_retries=3)
    (spec,) = collection.take(1)
    collection.stop("the budget of 3 s was over")
    collection.ended(spec, played(spec, None, Outcome.ABORTED))
    kept = collection.result(1.0).groups[0].trajectories
    assert [(t.outcome, t.reward, t.reward_reason) for t in kept] == [
        (Outcome.ABORTED, None, "the budget of 3 s was over")
    ] * 2
    assert collection.accounting == Accounting(started=1, unknown=2, unstarted=1)


class Rollout:
    """Plays requests through a real Collection, some episodes at a time; a budget is over after the first ones."""

    def __init__(self, batch: int = 2, seconds: float = 0.0) -> None:
        self.batch, self.seconds, self.broken = batch, seconds, False
        self.took = 0.0
        self.outcome = Outcome.COMPLETED
        self.requests: list[CollectRequest] = []
        self.batches = 0

    async def collect(self, request, on_episode):
        if self.broken:
            raise RuntimeError("engine 0 died")
        self.requests.append(request)
        collection = Collection(request, 0, on_episode=on_episode)
        while not collection.done:
            await asyncio.sleep(self.seconds)
            self.batches += 1
            for spec in collection.take(self.batch):
                reward = float(spec.sample % 2) if self.outcome is Outcome.COMPLETED else None
                collection.ended(spec, played(spec, reward, self.outcome))
            if request.budget_s is not None:
                collection.stop("the budget was over")
        return collection.result(self.took)


class Shown:
    """Output of the terminal."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def phase(self, name: str, total: int = 0):
        self.phases.append((name, total, []))
        yield self.phases[-1][2].append


def evaluator(rollout: Rollout, *overrides: str, rows: list[Task] | None = None) -> Evaluator:
    config = load([*TINY, "eval.samples=4", "eval.tasks=3", *overrides])
    return Evaluator(config.eval, config.rollout, config.run, rows or tasks(a=3, b=2), rollout.collect)


async def test_an_evaluation_plays_both_temperatures_and_tells_its_numbers():
    rollout, shown = Rollout(), Shown()
    metrics = (await evaluator(rollout).play(shown.phase)).metrics(1.0)
    assert [(r.samples, r.temperature, r.purpose, r.budget_s) for r in rollout.requests] == [
        (4, 1.0, "eval", None),
        (1, 0.0, "eval", None),
    ]
    assert [(name, total, done[-1]) for name, total, done in shown.phases] == [
        ("evaluation", 12, 12),
        ("greedy evaluation", 3, 3),
    ]
    assert (metrics["eval/all/pass_at_1"], metrics["eval/all/greedy_pass_at_1"]) == (0.5, 0)
    assert (metrics["eval/a/tasks"], metrics["eval/b/tasks"]) == (2, 1)
    assert (metrics["eval/all/tasks"], metrics["eval/all/tasks_held_out"]) == (3, 5)
    assert metrics["eval/all/attempts_started"] == 15
    assert metrics["timing/eval"] > 0


async def test_an_evaluation_that_cannot_be_played_is_refused_after_its_first_part():
    rollout = Rollout()
    rollout.outcome = Outcome.REFUSED
    with pytest.raises(UserError, match="evaluation: no episode can be played, most often refused"):
        await evaluator(rollout).play(Shown().phase)
    assert len(rollout.requests) == 1
    rollout.outcome = Outcome.ENV_FAILED  # this may pass
    assert (await evaluator(rollout).play(Shown().phase)).metrics(1.0)["eval/all/tasks_scored"] == 0


async def test_a_budget_covers_every_environment_and_is_shared_with_the_greedy_part():
    rollout = Rollout(batch=3)
    metrics = (await evaluator(rollout, "eval.budget_s=100", "eval.samples=99").play(Shown().phase)).metrics(1.0)
    assert (metrics["eval/all/tasks"], metrics["eval/all/tasks_scored"]) == (3, 3)
    assert metrics["eval/all/attempts_unstarted"] >= 3 * 90
    assert metrics["eval/all/outcome/aborted"] + metrics["eval/all/outcome/completed"] == metrics["eval/all/episodes"]
    assert metrics["eval/all/pass_at_1"] == 0  # the samples numbered 0: what was not played is not a zero and no one
    assert [r.budget_s for r in rollout.requests] == [99, 100]


@pytest.mark.parametrize(("took", "left"), [(60.0, 40.0), (99.5, 0.5), (130.0, 0.0)])
async def test_the_greedy_part_has_what_the_episodes_left_of_the_budget(took, left):
    rollout = Rollout()
    rollout.took = took  # however long it was until they could begin
    await evaluator(rollout, "eval.budget_s=100").play(Shown().phase)
    assert [r.budget_s for r in rollout.requests] == [80, left]


async def test_the_background_gives_the_same_and_raises_what_it_met():
    rollout = Rollout()
    one = evaluator(rollout)
    now = (await one.play(Shown().phase)).metrics(1.0)
    one.start()
    later = (await one.finish()).metrics(1.0)
    assert {k: v for k, v in now.items() if k != "timing/eval"} == {
        k: v for k, v in later.items() if k != "timing/eval"
    }
    assert rollout.requests[:2] == rollout.requests[2:]
    rollout.broken = True
    one.start()
    with pytest.raises(RuntimeError, match="engine 0 died"):
        await one.finish()
    await one.close()


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_an_unwanted_evaluation_in_the_background_ends_at_once(how):
    rollout = Rollout(batch=1, seconds=0.02)
    one = evaluator(rollout, "eval.samples=999")
    one.start()
    await until(lambda: rollout.batches > 1)
    if how == "cancel":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.finish(), 0.1)
    await one.close()
    await one.close()
    batches = rollout.batches
    assert batches < 999
    await asyncio.sleep(0.1)
    assert rollout.batches == batches


async def test_a_failure_that_nobody_waited_for_does_not_disturb_the_end():
    rollout = Rollout()
    rollout.broken = True
    one = evaluator(rollout)
    one.start()
    await asyncio.sleep(0)
    await one.close()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["eval.upload=/tmp/somewhere"], "not an address in an object store"),
        (["eval.upload=s3://"], "not an address in an object store"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, words):
    with pytest.raises(UserError, match=words):
        validate.check(load([*TINY, *overrides]))
    for colocated in ("false", "true"):
        overlapped = ("eval.overlap=true", f"rollout.engine.colocated={colocated}")
        validate.check(load([*TINY, *overlapped, "eval.upload=s3://bucket/a", "eval.budget_s=5"]))


def test_the_shipped_choices_load():
    folder = Path(__file__).parents[2] / "configs" / "eval"
    for file in folder.glob("*.yaml"):
        validate.check(load([*TINY, f"eval={file.stem}"]))
