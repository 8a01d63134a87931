"""The prompt sampler: whole epochs, exact resume."""

import json
from collections import Counter

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.data.sampler import PromptSampler
from megatron_fleet.data.task import Task

TASKS = [Task(f"t{i}", "p", "e", "v") for i in range(10)]


def keys(batch):
    return [t.key for t in batch]


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
