"""Partitions of costs: nothing lost, near the best one, and what the heuristics are known to find."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.trainer.packing.pack_plan import GOOD_ENOUGH, balance, exchange, karmarkar_karp, multifit

costs_of_items = st.lists(st.floats(0.01, 1e15), max_size=40)


def loads(partition, costs):
    return [sum(costs[i] for i in group) for group in partition]


def best_partition(costs, groups):
    """Best of all partitions."""
    return min(
        max(sum(c for c, g in zip(costs, chosen, strict=True) if g == group) for group in range(groups))
        for chosen in product(range(groups), repeat=len(costs))
    )


@given(costs=costs_of_items, groups=st.integers(1, 9))
@settings(deadline=None)
def test_every_item_is_in_one_group(costs, groups):
    for partition in (balance(costs, groups), karmarkar_karp(costs, groups)):
        assert len(partition) == groups
        assert sorted(i for group in partition for i in group) == list(range(len(costs)))
    assert balance(costs, groups) == balance(costs, groups)


@given(costs=st.lists(st.floats(0.01, 100), min_size=1, max_size=7), groups=st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_no_worse_than_its_bound(costs, groups):
    """Differencing is never more than 4/3 of the best partition (Michiels et al. 2003); exchanges only help."""
    best = best_partition(costs, groups)
    first = max(loads(karmarkar_karp(costs, groups), costs))
    assert max(loads(balance(costs, groups), costs)) <= first * (1 + 1e-9)
    assert first <= best * (4 / 3) * (1 + 1e-9)
    assert max(loads(multifit(costs, groups), costs)) <= best * 1.25


def test_the_textbook_example_of_differencing():
    """Korf 1998: longest-first leaves 17 and 13, differencing 16 and 14; the best is 15."""
    costs = [8.0, 7.0, 6.0, 5.0, 4.0]
    assert sorted(loads(karmarkar_karp(costs, 2), costs)) == [14, 16]
    assert sorted(loads(balance(costs, 2), costs)) == [15, 15]


def plain_differencing(costs, groups):
    """Every partial solution with all its groups, the list of solutions sorted anew for each step."""
    partial = [sorted([c] + [0.0] * (groups - 1)) for c in costs]
    while len(partial) > 1:
        partial.sort(key=lambda sums: sums[-1] - sums[0])
        a, b = partial.pop(), partial.pop()
        partial.append(sorted(x + y for x, y in zip(a, reversed(b), strict=True)))
    return partial[0]


def test_differencing_of_several_groups_equals_a_plain_one():
    rng = np.random.default_rng(0)
    for count, groups in ((5, 2), (3, 4), (12, 3), (40, 7), (64, 5)):
        costs = rng.lognormal(0, 1, count).tolist()
        np.testing.assert_allclose(
            sorted(loads(karmarkar_karp(costs, groups), costs)), plain_differencing(costs, groups), rtol=1e-12
        )


@given(costs=costs_of_items, groups=st.integers(2, 9))
@settings(deadline=None)
def test_no_exchange_is_left_that_helps(costs, groups):
    partition = balance(costs, groups)
    totals = loads(partition, costs)
    worst = max(range(groups), key=totals.__getitem__)
    if totals[worst] <= (1 + GOOD_ENOUGH) * sum(totals) / groups:
        return
    for other in set(range(groups)) - {worst}:
        for given_item in partition[worst]:
            for cost in [0.0, *(costs[i] for i in partition[other])]:
                gain = costs[given_item] - cost
                assert max(totals[worst] - gain, totals[other] + gain) >= totals[worst] * (1 - 1e-8)


def test_moves_and_swaps_lower_the_costliest_group():
    costs = np.array([9.0, 4.0, 1.0, 2.0, 6.0])
    # 14, 2, 6: the 4 goes to the second group, then the 1 away from the 9.
    assert sorted(loads(exchange([[0, 1, 2], [3], [4]], costs), costs)) == [6, 7, 9]
    # 12, 8: no move helps, 7 for 5 does.
    assert sorted(map(sorted, exchange([[0, 1], [2, 3]], np.array([7.0, 5.0, 5.0, 3.0])))) == [[0, 3], [1, 2]]


def test_multifit_helps_where_groups_have_few_items():
    costs = [18.0, 18.0, 11.0, 10.0, 8.0, 8.0, 5.0, 3.0]
    assert max(loads(exchange(karmarkar_karp(costs, 4), np.array(costs)), costs)) == 23
    assert max(loads(balance(costs, 4), costs)) == 21


def test_multifit_finds_the_least_limit():
    """1.5 times the mean of 22.3 is enough, 1.25 times is not, 28 is: the search goes up again after it went down."""
    costs = [18.0, 17.0, 15.0, 13.0, 4.0]
    assert sorted(loads(multifit(costs, 3), costs)) == [17, 22, 28]


def test_equal_costs_are_counted_out():
    assert sorted(map(len, balance([1.0] * 11, 4))) == [2, 3, 3, 3]
    assert sorted(map(len, balance([5.0], 3))) == [0, 0, 1]
    assert balance([], 3) == [[], [], []]
