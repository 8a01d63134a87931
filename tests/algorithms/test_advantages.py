"""Advantages against formulas written another way, by hand and by brute force."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.algorithms.advantages import ADVANTAGES, group_advantages, has_signal
from megatron_fleet.config.errors import UserError

rewards_of_a_group = st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=8)


def test_grpo_by_hand():
    # mean 0.25, unbiased variance (0.5625 + 3 * 0.0625) / 3 = 0.25, std 0.5
    assert group_advantages([1, 0, 0, 0], "grpo") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_grpo_equals_the_statistics_module(rewards):
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    expected = [(r - mean) / (std + 1e-6) for r in rewards]
    assert group_advantages(rewards, "grpo") == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_leave_one_out_compares_with_the_others(rewards):
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(expected, abs=1e-9)


def test_without_std_is_only_centred():
    assert group_advantages([2.0, 0.0, 0.5, 1.5], "grpo_no_std") == pytest.approx([1.0, -1.0, -0.5, 0.5])


@given(rewards_of_a_group, st.sampled_from(sorted(ADVANTAGES)))
def test_unknown_rewards_change_nothing_for_the_others(rewards, name):
    known = [r for r in rewards if r is not None]
    result = group_advantages(rewards, name)
    if len(known) < 2:
        assert result is None
        return
    assert [a is None for a in result] == [r is None for r in rewards]
    assert [a for a in result if a is not None] == group_advantages(known, name)
    assert math.fsum(a for a in result if a is not None) == pytest.approx(0, abs=1e-6)


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.sampled_from(sorted(ADVANTAGES)))
def test_equal_rewards_give_exact_zeros(value, n, name):
    assert group_advantages([value] * n, name) == [0.0] * n
    assert not has_signal([value] * n)


def test_a_reward_that_is_not_finite_is_unknown():
    assert group_advantages([1.0, math.nan, 0.0, math.inf], "grpo_no_std") == [0.5, None, -0.5, None]


@pytest.mark.parametrize(("rewards", "signal"), [([1, 0], True), ([1, None], False), ([], False), ([0, None, 1], True)])
def test_signal_needs_two_known_rewards_that_differ(rewards, signal):
    assert has_signal(rewards) is signal


def test_an_unknown_name_is_refused():
    with pytest.raises(
        UserError, match=r"algorithm\.advantage=gae is neither a built-in name nor package\.module:name"
    ):
        group_advantages([0, 1], "gae")
