import math

import pytest

from megatron_fleet.config.schema import Optimizer
from megatron_fleet.loop.schedule import lr_at


def rates(total, **settings):
    optimizer = Optimizer(lr=1.0, **settings)
    return [lr_at(step, optimizer, total) for step in range(total)]


def test_constant_after_warmup():
    assert rates(5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_linear_reaches_the_minimum_at_the_last_step():
    assert rates(7, schedule="linear", warmup_steps=2, min_lr=0.2) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine():
    got = rates(5, schedule="cosine")
    assert got == pytest.approx([(1 + math.cos(math.pi * i / 4)) / 2 for i in range(5)])


def test_steps_past_the_end_stay_at_the_minimum():
    assert lr_at(100, Optimizer(lr=1.0, schedule="cosine", min_lr=0.1), 10) == pytest.approx(0.1)


def test_warmup_as_long_as_the_run():
    assert rates(3, schedule="linear", warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1.0])
