"""The breaker against a model of what it promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.envs.provision import MAX_PAUSE, Breaker


def fill(breaker, failures, now=0.0):
    for failed in failures:
        breaker.ended(breaker.admit(now), now, failed)


def test_it_opens_at_the_threshold_and_only_with_a_full_window():
    breaker = Breaker(window=5, threshold=0.8, pause_s=60)
    fill(breaker, [True] * 4)
    assert not breaker.open
    fill(breaker, [False])
    assert breaker.open and breaker.admit(59.9) is None and breaker.seconds_left(10) == 50


def test_below_the_threshold_it_never_opens():
    breaker = Breaker(window=5, threshold=0.8, pause_s=60)
    fill(breaker, [True, True, True, False, False] * 50)
    assert not breaker.open


def test_one_probe_at_a_time_and_each_failed_one_doubles_the_pause():
    breaker = Breaker(window=2, threshold=1, pause_s=10)
    fill(breaker, [True, True])
    now = 0.0
    for pauses in (1, 2, 4, 8, 16, 32, 32):
        assert breaker.seconds_left(now) == 10 * min(pauses, MAX_PAUSE)
        now += 10 * pauses
        probe = breaker.admit(now)
        assert probe is not None and breaker.admit(now + 1000) is None
        breaker.ended(probe, now, True)
    assert breaker.admit(now + 320 - 0.1) is None


def test_a_good_probe_closes_it_and_what_was_is_forgotten():
    breaker = Breaker(window=2, threshold=1, pause_s=10)
    fill(breaker, [True, True])
    breaker.ended(breaker.admit(10.0), 11.0, False)
    assert not breaker.open
    fill(breaker, [True], now=12.0)
    assert not breaker.open
    fill(breaker, [True], now=13.0)
    assert breaker.open and breaker.seconds_left(13.0) == 10


@pytest.mark.parametrize("stray", [True, False, None])
def test_episodes_admitted_before_it_opened_change_nothing(stray):
    breaker = Breaker(window=2, threshold=1, pause_s=10)
    early = [breaker.admit(0.0) for _ in range(3)]
    fill(breaker, [True, True])
    breaker.ended(early[0], 5.0, stray)
    assert breaker.open and breaker.seconds_left(5.0) == 5
    probe = breaker.admit(10.0)
    breaker.ended(early[1], 10.0, stray)
    assert breaker.open and breaker.admit(10.0) is None
    breaker.ended(probe, 11.0, False)
    assert not breaker.open


def test_a_probe_that_says_nothing_makes_room_for_another():
    breaker = Breaker(window=1, threshold=1, pause_s=10)
    fill(breaker, [True])
    breaker.ended(breaker.admit(10.0), 11.0, None)
    assert breaker.open and breaker.admit(11.0) is not None


STEPS = st.lists(st.tuples(st.floats(0, 30), st.sampled_from([True, False, None]), st.booleans()), max_size=150)


@given(st.integers(1, 6), st.floats(0.1, 1), STEPS)
def test_whatever_happens(window, threshold, steps):
    """Closed admits all. Open admits none before its time, then one at a time. It closes only by a good probe."""
    breaker = Breaker(window, threshold, pause_s=10)
    now, under_way = 0.0, []
    for seconds, failed, finish in steps:
        now += seconds
        was_open, left = breaker.open, breaker.seconds_left(now)
        if finish and under_way:
            ticket, probe = under_way.pop(0)
            breaker.ended(ticket, now, failed)
            if was_open and not breaker.open:
                assert probe and failed is False
            if not was_open and breaker.open:
                assert failed is not None and breaker.seconds_left(now) > 9.99
        else:
            ticket = breaker.admit(now)
            assert was_open or ticket is not None
            assert left == 0 or ticket is None
            if ticket is not None:
                under_way.append((ticket, was_open))
        assert 0 <= breaker.seconds_left(now) <= 10 * MAX_PAUSE + 0.01
        assert len({ticket for ticket, _ in under_way}) == len(under_way)
