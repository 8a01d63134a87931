import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.config.schema import OptimizerConfig
from megatron_fleet.loop.update import lr_at


def rates(total, **settings):
    optimizer = OptimizerConfig(lr=1.0, **settings)
    return [lr_at(step, optimizer, total) for step in range(total)]


def test_constant_after_warmup():
    assert rates(5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_linear_reaches_the_minimum_one_step_after_the_last():
    settings = {"schedule": "linear", "warmup_steps": 2, "min_lr": 0.2}
    assert rates(6, **settings) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])
    assert lr_at(6, OptimizerConfig(lr=1.0, **settings), 6) == pytest.approx(0.2)


def test_cosine():
    got = rates(5, schedule="cosine")
    assert got == pytest.approx([(1 + math.cos(math.pi * i / 5)) / 2 for i in range(5)])


def test_steps_past_the_end_stay_at_the_minimum():
    assert lr_at(100, OptimizerConfig(lr=1.0, schedule="cosine", min_lr=0.1), 10) == pytest.approx(0.1)


def decays_of_transformers(step, warmup, total):
    """After the warm-up: get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup (num_cycles=0.5)."""
    progress = (step - warmup) / max(1, total - warmup)
    return {
        "linear": max(0.0, (total - step) / max(1, total - warmup)),
        "cosine": max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress))),
    }


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@given(warmup=st.integers(0, 50), steps=st.integers(1, 50))
def test_every_batch_trains_and_the_shape_is_that_of_transformers(schedule, warmup, steps):
    total = warmup + steps
    found = rates(total, schedule=schedule, warmup_steps=warmup)
    assert min(found) > 0
    expected = [decays_of_transformers(step, warmup, total)[schedule] for step in range(warmup, total)]
    assert found[warmup:] == pytest.approx(expected)


def test_warmup_as_long_as_the_run():
    assert rates(3, schedule="linear", warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0])
