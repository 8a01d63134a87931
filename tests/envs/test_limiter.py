"""The limiter against simulated servers: it finds what they bear, and never more than it promises."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.envs.provision import Limiter

EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "started", "refused", "dropped"]), st.floats(0.001, 100)), max_size=200
)


@given(st.integers(1, 64), st.integers(0, 64), EVENTS)
def test_the_limit_stays_between_one_and_the_most_and_is_kept(first, more, events):
    limiter = Limiter(first, first + more, quick_s=1.0)
    now, under_way = 0.0, []
    for what, seconds in events:
        now += seconds
        if what == "begin":
            room = len(under_way) < int(limiter.limit)
            assert limiter.begin() == room
            under_way += [now] if room else []
        elif under_way:
            before = limiter.limit
            limiter.end(under_way.pop(0), now + 0.001, what)
            assert what != "dropped" or limiter.limit == before
            assert what != "refused" or limiter.limit <= before
        assert limiter.under_way == len(under_way)
        assert 1 <= limiter.limit <= first + more


def test_one_round_of_refusals_halves_once():
    limiter = Limiter(16, 64, quick_s=1.0)
    assert all(limiter.begin() for _ in range(16)) and not limiter.begin()
    for i in range(16):
        limiter.end(began=0.0, now=5.0 + i, result="refused")
    assert limiter.limit == 8
    assert limiter.begin()
    limiter.end(began=21.0, now=22.0, result="refused")
    assert limiter.limit == 4


def round_of_starts(limiter, now):
    """All that the limit allows are started and end at once, while more wait."""
    while limiter.begin():
        pass
    for _ in range(limiter.under_way):
        limiter.end(now, now + 0.1, "started")
        while limiter.begin():
            pass
    while limiter.under_way:
        limiter.end(now, now + 0.1, "dropped")


def test_quick_starts_double_the_limit_per_round_until_one_is_refused():
    limiter = Limiter(4, 1000, quick_s=1.0)
    for number, expected in enumerate([8, 16, 32]):
        round_of_starts(limiter, number)
        assert limiter.limit == expected
    assert limiter.begin()
    limiter.end(10.0, 10.1, "refused")
    assert limiter.limit == 16
    round_of_starts(limiter, 11.0)
    assert 16.9 < limiter.limit <= 17


def test_unused_room_does_not_grow():
    limiter = Limiter(4, 1000, quick_s=1.0)
    for i in range(100):
        assert limiter.begin()
        limiter.end(i, i + 0.1, "started")
    assert limiter.limit == 4


def simulate(starts: int, service_s: float, servers: int, capacity: int | None, first: int = 8):
    """``starts`` wanted at once; the control plane makes ``servers`` at a time, each in ``service_s``, and refuses when
    ``capacity`` are with it. Returns the seconds it took, the highest load seen, refusals, and the limit at the end."""
    limiter = Limiter(first, 256, quick_s=1.0)
    now, left, most, refused, retry_at = 0.0, starts, 0, 0, 0.0
    free_at = [0.0] * servers
    under_way: list[tuple[float, float, str]] = []
    while left or under_way:
        while left > len(under_way) and now >= retry_at and limiter.begin():
            if capacity is not None and len(under_way) >= capacity:
                heapq.heappush(under_way, (now + 0.01, now, "refused"))
                continue
            done = max(now, heapq.heappop(free_at)) + service_s
            heapq.heappush(free_at, done)
            heapq.heappush(under_way, (done, now, "started"))
        most = max(most, len(under_way))
        if not under_way:
            now = retry_at
            continue
        now, began, result = heapq.heappop(under_way)
        limiter.end(began, now, result)
        left -= result == "started"
        if result == "refused":
            refused += 1
            retry_at = now + 1.0
    return now, most, refused, limiter.limit


def test_a_plane_that_makes_one_instance_in_ten_seconds_is_not_stormed():
    seconds, most, _, limit = simulate(starts=300, service_s=10, servers=1, capacity=None)
    assert seconds == pytest.approx(3000)  # it never idles
    assert most <= 9 and 2 <= limit <= 8  # and at most a handful wait there, of 300


def test_a_quick_parallel_plane_is_used():
    seconds, most, _, limit = simulate(starts=2000, service_s=0.5, servers=64, capacity=None)
    assert limit == 256 or most >= 64
    assert seconds < 1.5 * 2000 * 0.5 / 64


def test_refusals_find_the_capacity():
    seconds, _, refused, limit = simulate(starts=400, service_s=2, servers=6, capacity=6, first=64)
    assert limit < 13
    assert refused < (64 - 6) + 400 / 3  # the first burst, then now and then one that looks for more room
    assert seconds < 2.5 * 400 * 2 / 6
