"""Episodes on disk: they come back as they were, are played once, and never mix with those of something else."""

from asyncio import CancelledError
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("hydra")

from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.eval_command import play
from megatron_fleet.evaluation.store import EpisodeStore, identity
from megatron_fleet.evaluation.terminal import show, table
from megatron_fleet.rollout.collection import Collection
from megatron_fleet.rollout.requests import EpisodeSpec

TASKS = [Task(f"task-{i}", "p", "shop", "") for i in range(4)]
OF = {"run": {"seed": 0}, "model": {"path": "m", "weights": {"a": [1, 2]}}}


def played(spec: EpisodeSpec, outcome: Outcome = Outcome.COMPLETED, reward: float | None = 1.0) -> Trajectory:
    n = 5 + spec.sample
    mask = np.arange(n) >= 3
    spans = (Span("prompt", 0, 2, 0), Span("observation", 2, 3, 0), Span("action", 3, n, 1, 9))
    return Trajectory(
        *(spec.task.key, spec.task.env_key, spec.group, spec.sample, np.arange(n, dtype=np.int32) + 7, mask),
        *(np.where(mask, -0.5, 0).astype(np.float32), spans, reward, "why", outcome, "42"),
        metrics={"turns": 2},
        messages=[{"role": "user", "content": "héllo"}],
    )


class Rollout:
    """Plays through a real Collection; breaks off after ``most`` episodes; gives up those of ``given_up``."""

    def __init__(self, most: int = 10**6, given_up: str = "") -> None:
        self.most, self.given_up = most, given_up
        self.specs: list[tuple[str, int, float]] = []

    async def collect(self, request, on_episode):
        collection = Collection(request, max_retries=0, on_episode=on_episode)
        while not collection.done:
            (spec,) = collection.take(1)
            if len(self.specs) == self.most:
                raise CancelledError
            self.specs.append((spec.task.key, spec.sample, spec.temperature))
            if spec.task.key == self.given_up:
                collection.stop("the budget was over")
                collection.ended(spec, played(spec, Outcome.ABORTED, None))
                break
            collection.ended(spec, played(spec))
        return collection.result(1.0)


async def evaluate(folder, rollout: Rollout, tasks=TASKS, samples: int = 3, of=OF):
    config = load(["experiment=quickstart", f"eval.samples={samples}"])
    return await play(config, tasks, EpisodeStore(folder, of, tasks), rollout.collect)


def numbers(evaluation) -> dict[str, float]:
    skipped = ("timing/", "eval/all/attempts_")
    return {name: value for name, value in evaluation.metrics(1.0).items() if not name.startswith(skipped)}


async def test_an_evaluation_that_was_cut_off_goes_on(tmp_path):
    whole = await evaluate(tmp_path / "whole", Rollout())
    first = Rollout(most=8)
    with pytest.raises(CancelledError):
        await evaluate(tmp_path / "cut", first)
    second = Rollout()
    resumed = await evaluate(tmp_path / "cut", second)
    assert 0 < len(second.specs) < 15
    assert set(first.specs) | set(second.specs) == {(t.key, s, 1.0) for t in TASKS for s in range(3)} | {
        (t.key, 0, 0.0) for t in TASKS
    }
    assert len(set(first.specs) & set(second.specs)) <= 2  # what had ended, but was not reported yet
    assert numbers(resumed) == numbers(whole)
    for a, b in zip(whole.sampled + whole.greedy, resumed.sampled + resumed.greedy, strict=True):
        for one, two in zip(a.trajectories, b.trajectories, strict=True):
            assert_equal(one, two)
    third = Rollout()
    assert numbers(await evaluate(tmp_path / "cut", third)) == numbers(whole)
    assert third.specs == []


def assert_equal(one: Trajectory, two: Trajectory) -> None:
    for name in Trajectory.__slots__:
        a, b = getattr(one, name), getattr(two, name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and np.array_equal(a, b), name
        else:
            assert a == b, name


async def test_what_was_given_up_is_played_the_next_time(tmp_path):
    cut = await evaluate(tmp_path, Rollout(given_up="task-2"), samples=1)
    assert cut.metrics(1.0)["eval/all/tasks_scored"] == 2
    again = Rollout()
    assert (await evaluate(tmp_path, again, samples=1)).metrics(1.0)["eval/all/tasks_scored"] == 4
    assert {key for key, _, temperature in again.specs if temperature} == {"task-2", "task-3"}


async def test_more_tasks_and_samples_add_to_what_is_there(tmp_path):
    await evaluate(tmp_path, Rollout(), TASKS[1:3], samples=1)
    more = Rollout()
    groups = (await evaluate(tmp_path, more, TASKS, samples=2)).sampled
    assert {(key, sample) for key, sample, temperature in more.specs if temperature} == {
        *((key, sample) for key in ("task-0", "task-3") for sample in (0, 1)),
        *(("task-1", 1), ("task-2", 1)),
    }
    assert [(g.index, [(t.group, t.sample) for t in g.trajectories]) for g in groups] == [
        (i, [(i, 0), (i, 1)]) for i in range(4)
    ]


def test_episodes_of_something_else_are_refused(tmp_path):
    EpisodeStore(tmp_path, OF, TASKS)
    with pytest.raises(UserError, match=r"model\.weights\.a=\[1, 2\], not \[1, 3\]"):
        EpisodeStore(tmp_path, OF | {"model": {"path": "m", "weights": {"a": [1, 3]}}}, TASKS)
    with pytest.raises(UserError, match="task task-1 is not what it was"):
        EpisodeStore(tmp_path, OF, [TASKS[0], replace(TASKS[1], prompt="q")])


def test_identity_has_what_decides_an_episode_and_nothing_else():
    def of(*overrides: str) -> dict:
        return identity(load(["experiment=quickstart", *overrides]), {"path": "m"})

    same = ("rollout.workers=2", "rollout.engine.replicas=2", "eval.samples=9", "run.out=elsewhere", "run.steps=3")
    assert of(*same) == of()
    for other in ("run.seed=1", "rollout.thinking=false", "rollout.sampling.max_turns=3", "rollout.max_context=900"):
        assert of(other) != of(), other


def test_without_a_terminal_every_tenth_of_an_evaluation_is_a_line(capsys):
    with show("greedy evaluation", 40) as advance:
        for done in (0, 1, 3, 4, 5, 9, 10, 30, 40, 40):
            advance(done)
    told = [f"greedy evaluation: {done}/40 episodes" for done in (4, 9, 30, 40)]
    assert capsys.readouterr().out.splitlines() == told


def test_the_table_has_a_line_per_environment():
    metrics = {"eval/all/tasks": 3.0, "eval/shop/tasks": 2, "eval/shop/pass_at_4": 0.5, "eval/shop/avg_turns": 2.25}
    metrics |= {"eval/all/unknown_reward_rate": 1 / 3, "timing/eval": 2.0, "eval/b/greedy_pass_at_1": 1}
    heading, b, shop, everything = (line.split() for line in table(metrics, samples=4).splitlines())
    assert heading[:3] == ["environment", "tasks", "scored"]
    assert b[:5] == ["b", "–", "–", "–", "1.000"]
    assert (shop[0], shop[1], shop[6], shop[8]) == ("shop", "2", "0.500", "2.2")
    assert (everything[0], everything[-1]) == ("all", "0.333")


def test_a_part_that_was_removed_gives_its_number_to_none_that_is_there(tmp_path):
    """As a damaged one is, which the message says."""
    store = EpisodeStore(tmp_path, OF, TASKS)
    for sample in range(2):
        store.add("sampled", played(EpisodeSpec(TASKS[0], 0, sample, 0, 1.0)))
        store.flush()
    (tmp_path / "parts" / "sampled-000000.parquet").write_text("damaged")
    with pytest.raises(UserError, match=r"sampled-000000\.parquet is damaged .*remove it"):
        store.played("sampled", 4)
    (tmp_path / "parts" / "sampled-000000.parquet").unlink()
    store.add("sampled", played(EpisodeSpec(TASKS[1], 1, 0, 0, 1.0)))
    store.flush()
    assert sorted(store.played("sampled", 4)) == [(0, 1), (1, 0)]
