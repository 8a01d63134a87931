"""Whatever becomes of the attempts, every episode comes back exactly once and the counts add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.agents.trajectory import Outcome, Span, Trajectory
from megatron_fleet.data.task import Task
from megatron_fleet.rollout.collection import MAX_LOSSES, Collection
from megatron_fleet.rollout.requests import Accounting, CollectRequest, EpisodeSpec


def request(tasks: int = 2, samples: int = 3, seed: int | None = 5, step: int = 1, purpose: str = "train"):
    rows = [Task(key=f"t{i}", prompt="p", env_key=f"e{i % 2}", verifier_code="") for i in range(tasks)]
    return CollectRequest(step, rows, samples, 1.0, purpose, seed)


def played(spec: EpisodeSpec, reward: float | None, outcome: Outcome = Outcome.COMPLETED) -> Trajectory:
    return Trajectory(
        spec.task.key, spec.task.env_key, spec.group, spec.sample,
        np.arange(4, dtype=np.int32), np.array([0, 1, 1, 0], bool), np.zeros(4, np.float32),
        (Span("prompt", 0, 4, 0),), reward, "", outcome, metrics={"attempt": spec.attempt},
    )  # fmt: skip


FATES = st.sampled_from(["known", "unknown", "aborted", "component lost"])


@given(st.lists(FATES, max_size=60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2))
def test_each_episode_returns_once_whatever_happens(fates, tasks, samples, batch, retries):
    collection = Collection(request(tasks, samples), retries)
    fate, attempts = iter(fates), []
    while not collection.done:
        specs = collection.take(batch)
        assert specs, "an unfinished collection with nothing under way always has something to play"
        for spec in specs:
            attempts.append((spec.group, spec.sample, spec.attempt))
            match next(fate, "known"):
                case "known":
                    collection.ended(spec, played(spec, 1.0))
                case "unknown":
                    collection.ended(spec, played(spec, None, Outcome.VERIFIER_FAILED))
                case "aborted":
                    collection.ended(spec, played(spec, None, Outcome.ABORTED))
                case "component lost":
                    collection.lost(spec)
    result = collection.result(1.0)
    assert [(g.index, g.task_key) for g in result.groups] == [(i, f"t{i}") for i in range(tasks)]
    for group in result.groups:
        assert [t.sample for t in group.trajectories] == list(range(samples))
        assert all(t.group == group.index and t.task_key == group.task_key for t in group.trajectories)
        for trajectory in group.trajectories:
            trajectory.check()
    kept = [t for g in result.groups for t in g.trajectories]
    counts = result.accounting
    assert counts.started == len(attempts) == len(set(attempts))  # an attempt is played once
    assert counts.known == sum(t.reward is not None for t in kept)
    assert counts.unknown == sum(t.reward is None for t in kept)
    assert counts.retried <= retries * tasks * samples and counts.aborted <= (MAX_LOSSES - 1) * tasks * samples


def test_an_unknown_reward_is_played_again_as_another_attempt_and_then_kept_as_unknown():
    collection = Collection(request(1, 1), max_retries=1)
    (first,) = collection.take(9)
    collection.ended(first, played(first, None, Outcome.ENV_FAILED))
    (second,) = collection.take(9)
    assert (first.attempt, second.attempt, second.seed) == (0, 1, first.seed)
    collection.ended(second, played(second, None, Outcome.ENV_FAILED))
    result = collection.result(1.0)
    assert result.accounting == Accounting(started=2, known=0, unknown=1, retried=1)
    assert result.groups[0].trajectories[0].metrics["attempts_retried"] == 1


@pytest.mark.parametrize("outcome", [Outcome.PROMPT_TOO_LONG, Outcome.REFUSED])
def test_what_would_end_in_the_same_way_is_not_played_again(outcome):
    collection = Collection(request(1, 1), max_retries=3)
    (spec,) = collection.take(9)
    collection.ended(spec, played(spec, None, outcome))
    assert collection.done and collection.accounting == Accounting(started=1, unknown=1)


def test_an_episode_that_went_down_too_often_is_given_up():
    collection = Collection(request(1, 1), max_retries=5)
    for _ in range(MAX_LOSSES):
        (spec,) = collection.take(9)
        collection.lost(spec)
    result = collection.result(1.0)
    (trajectory,) = result.groups[0].trajectories
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ABORTED, None)
    assert result.accounting == Accounting(started=MAX_LOSSES, unknown=1, aborted=MAX_LOSSES - 1)


def test_a_known_reward_of_a_failed_looking_episode_is_kept():
    collection = Collection(request(1, 1), max_retries=3)
    (spec,) = collection.take(1)
    collection.ended(spec, played(spec, 0.0, Outcome.MAX_TURNS))
    assert collection.done and collection.accounting.retried == 0


def test_seeds_tell_groups_and_purposes_apart_and_repeat():
    def seeds(**kwargs) -> list[int | None]:
        return [spec.seed for spec in Collection(request(**kwargs), 0).take(99)]

    train = seeds()
    assert train == seeds() and all(0 <= seed < 2**31 for seed in train)
    assert len({*train}) == 2  # one per group: the worker mixes in the rest
    assert not {*train} & {*seeds(purpose="eval")} and not {*train} & {*seeds(seed=6)}
    assert set(seeds(seed=None)) == {None}


@pytest.mark.parametrize("broken", [{"started": 3, "known": 2}, {"started": 2, "known": 1, "retried": 1}, {"known": 2}])
def test_counts_that_do_not_add_up_are_refused(broken):
    Accounting(started=4, known=1, unknown=1, retried=1, aborted=1).check(wanted=2)
    with pytest.raises(RuntimeError, match="do not add up"):
        Accounting(**broken).check(wanted=2)
