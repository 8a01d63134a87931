"""Spikes of the gradient norm."""

from __future__ import annotations

import json
import math

import pytest

from megatron_fleet.config.schema import SafetyConfig
from megatron_fleet.debug.dumps import Verdict
from megatron_fleet.loop.guard import FEWEST, WINDOW, StepJudge


def judge_after(*norms: float, factor: float | None = 10.0) -> StepJudge:
    judge = StepJudge(SafetyConfig(spike_factor=factor))
    for norm in norms:
        judge.record(norm, skipped=not math.isfinite(norm))
    return judge


def test_a_spike_is_far_above_the_median():
    judge = judge_after(1.0, 3.0, 2.0, 2.0, 2.0, 1.0, 3.0, 2.0)
    assert judge.median == 2.0
    assert judge.judge(0.5, 20.0) is Verdict.FINE
    assert judge.judge(0.5, 20.1) is Verdict.SPIKE


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("factor", [None, 10.0])
def test_what_is_not_finite_is_never_fine(norm, factor):
    assert judge_after(factor=factor).judge(0.5, norm) is Verdict.NOT_FINITE
    assert judge_after(factor=factor).judge(norm, 0.5) is Verdict.NOT_FINITE


def test_there_is_no_spike_without_a_yardstick():
    assert judge_after(*[1.0] * (FEWEST - 1)).judge(0.5, 1e9) is Verdict.FINE
    assert judge_after(*[1.0] * FEWEST).judge(0.5, 1e9) is Verdict.SPIKE
    assert judge_after(*[0.0] * WINDOW).judge(0.5, 1.0) is Verdict.FINE
    assert judge_after(*[1.0] * WINDOW, factor=None).judge(0.5, 1e9) is Verdict.FINE


@pytest.mark.parametrize("norms", [[], [0.0] * WINDOW, [2.0] * FEWEST, [1e308] * FEWEST])
def test_the_bound_of_the_trainer_holds_what_is_judged_and_what_is_not_finite(norms):
    judge = judge_after(*norms)
    bound = judge.bound(0.5)
    assert 0 < bound < math.inf
    assert judge.judge(0.5, bound) is Verdict.FINE
    above = math.nextafter(bound, math.inf)
    assert judge.judge(0.5, above) is (Verdict.SPIKE if above < math.inf else Verdict.NOT_FINITE)
    assert judge.bound(math.nan) < 0, "any norm is held when the loss is not finite"


def test_the_median_follows_a_lasting_rise_and_nothing_infinite():
    judge = judge_after(*[1.0] * WINDOW, *[math.inf, math.nan] * WINDOW)
    assert judge.median == 1.0
    for _ in range(WINDOW // 2):
        assert judge.judge(0.5, 100.0) is Verdict.SPIKE
        judge.record(100.0, skipped=False)
    assert judge.judge(0.5, 100.0) is Verdict.FINE


def test_skipped_steps_are_counted():
    judge = judge_after(1.0, math.nan, math.inf, 1.0, math.nan)
    assert (judge.skipped, judge.skipped_in_a_row) == (3, 1)


def test_the_state_goes_on_where_it_stopped():
    straight, stopped = judge_after(*range(1, 12), math.nan), judge_after(*range(1, 12), math.nan)
    resumed = judge_after()
    resumed.load(json.loads(json.dumps(stopped.state())))
    assert resumed.state() == straight.state()
    for norm in [*range(50), math.nan]:
        assert resumed.judge(0.5, norm) is straight.judge(0.5, norm)
        for judge in (resumed, straight):
            judge.record(norm, skipped=not math.isfinite(norm))
    assert resumed.state() == straight.state()
