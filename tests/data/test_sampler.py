"""The prompt sampler: whole epochs, exact resume."""

import json
from collections import Counter

import numpy as np
import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import MixtureConfig
from megatron_fleet.data.sampler import PromptSampler, make_sampler
from megatron_fleet.data.task import Task

TASKS = [Task(f"t{i}", "p", "e", "v") for i in range(10)]


def keys(batch):
    return [t.key for t in batch]


def test_the_order_of_tasks_by_default_never_changes():
    """Figures of published runs rest on it: numpy's permutation from [seed, epoch] of the tasks by key."""
    sampler = make_sampler(list(reversed(TASKS)), 5, 3, MixtureConfig())
    drawn = [key for _ in range(4) for key in keys(sampler.next())]
    assert drawn == [f"t{i}" for epoch in (0, 1) for i in np.random.default_rng([3, epoch]).permutation(10)]
    assert drawn[:10] == ["t9", "t6", "t0", "t2", "t1", "t4", "t7", "t5", "t3", "t8"]


def test_every_task_once_per_epoch_across_batch_borders():
    sampler = PromptSampler(TASKS, 4, seed=3)
    drawn = [key for _ in range(5) for key in keys(sampler.next())]
    assert Counter(drawn[:10]) == Counter(drawn[10:]) == Counter(keys(TASKS))
    assert drawn[:10] != drawn[10:]


def test_a_batch_larger_than_the_set_repeats_evenly():
    batch = keys(PromptSampler(TASKS, 25, seed=3).next())
    assert set(Counter(batch).values()) == {2, 3}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_resume_goes_on_exactly(steps):
    sampler = PromptSampler(TASKS, 4, seed=3)
    for _ in range(steps):
        sampler.next()
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = PromptSampler(list(reversed(TASKS)), 4, seed=3)
    resumed.load_state_dict(state)
    for _ in range(6):
        assert keys(resumed.next()) == keys(sampler.next())


def test_seed_decides_the_order():
    assert keys(PromptSampler(TASKS, 10, 1).next()) == keys(PromptSampler(TASKS, 10, 1).next())
    assert keys(PromptSampler(TASKS, 10, 1).next()) != keys(PromptSampler(TASKS, 10, 2).next())


def test_a_foreign_cursor_is_refused():
    state = PromptSampler(TASKS, 4, seed=3).state_dict()
    with pytest.raises(UserError, match="cursor"):
        PromptSampler(TASKS[:9], 4, seed=3).load_state_dict(state)
    with pytest.raises(UserError, match="cursor"):
        PromptSampler(TASKS, 4, seed=4).load_state_dict(state)


def test_no_task_is_refused():
    with pytest.raises(UserError, match="eval_fraction"):
        PromptSampler([], 4, seed=3)


def test_status_counts_the_environments_of_the_batch_and_of_all():
    tasks = [*TASKS, *(Task(f"u{i}", "p", "f", "v") for i in range(10))]
    sampler = PromptSampler(tasks, 8, seed=3)
    drawn = Counter()
    for _ in range(4):
        batch = Counter(task.env_key for task in sampler.next())
        drawn += batch
    status = sampler.status()
    assert status["mix_total"] == {env: drawn[env] / 32 for env in "ef"}
    assert status["epoch"] == {env: drawn[env] / 10 for env in "ef"}
    assert status["weight"] == {"e": 0.5, "f": 0.5}


def test_observing_changes_nothing():
    watched, other = PromptSampler(TASKS, 4, 3), PromptSampler(TASKS, 4, 3)
    for _ in range(5):
        watched.observe([(task.key, [0.0, 0.0]) for task in watched.next()])
        other.next()
    assert watched.state_dict() == other.state_dict()


def test_the_state_of_a_mixture_is_refused():
    state = make_sampler(TASKS, 4, 3, MixtureConfig(weights="uniform")).state_dict()
    with pytest.raises(UserError, match=r"data\.mixture\.weights=proportional.*saved with uniform"):
        PromptSampler(TASKS, 4, seed=3).load_state_dict(state)
