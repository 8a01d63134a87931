"""The packing plan: its invariants, on drawn batches, and what it chooses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.config.errors import UserError
from megatron_fleet.trainer.packing.pack_plan import balance, plan_micro_batches, round_up


def flops(lengths):
    return [n * (1 + n / 100) for n in lengths]


def micro_batches_of_first_fit(needs, capacity):
    """Tokens of each micro-batch that first-fit-decreasing opens."""
    micro_batches = []
    for need in sorted(needs, reverse=True):
        for place, used in enumerate(micro_batches):
            if used + need <= capacity:
                micro_batches[place] += need
                break
        else:
            micro_batches.append(need)
    return micro_batches


def waiting(costs):
    """Critical path of costs ``[rank][micro-batch]``: all ranks meet in each, a second pipeline stage is one behind."""
    return sum(map(max, zip(*costs, strict=True))) + max(map(max, costs))


@given(
    lengths=st.lists(st.integers(1, 512), max_size=60),
    dp=st.integers(1, 8),
    capacity=st.sampled_from([512, 600, 1024]),
    sequence_align=st.sampled_from([1, 4, 16]),
    micro_batch_align=st.sampled_from([1, 16, 64, 128]),
)
@settings(deadline=None)
def test_plan_keeps_its_promises(lengths, dp, capacity, sequence_align, micro_batch_align):
    costs = flops(lengths)
    plan = plan_micro_batches(lengths, dp, capacity, costs, sequence_align, micro_batch_align)
    count = len(plan[0])
    assert len(plan) == dp and count >= 1 and all(len(micro_batches) == count for micro_batches in plan)
    assert sorted(i for micro_batches in plan for micro_batch in micro_batches for i in micro_batch) == list(
        range(len(lengths))
    )
    for micro_batches in plan:
        for micro_batch in micro_batches:
            tokens = sum(round_up(lengths[i], sequence_align) for i in micro_batch)
            assert tokens % sequence_align == 0 and round_up(tokens, micro_batch_align) <= capacity
        own = [sum(costs[i] for i in micro_batch) for micro_batch in micro_batches]
        assert own == sorted(own, reverse=True)
        first = [i for i, micro_batch in enumerate(micro_batches) if not micro_batch]
        assert all(not micro_batch for micro_batch in micro_batches[min(first, default=count) :])
    free = capacity // micro_batch_align * micro_batch_align
    shares = [
        [round_up(lengths[i], sequence_align) for micro_batch in micro_batches for i in micro_batch]
        for micro_batches in plan
    ]
    assert count == max(1, *(len(micro_batches_of_first_fit(share, free)) for share in shares))
    assert plan == plan_micro_batches(lengths, dp, capacity, costs, sequence_align, micro_batch_align)


@given(lengths=st.lists(st.integers(1, 512), min_size=1, max_size=60), dp=st.integers(1, 8))
@settings(deadline=None)
def test_ranks_are_those_of_the_balance_of_costs(lengths, dp):
    """Micro-batches change nothing about which sequences share a rank, and tokens nothing about the balance."""
    costs = flops(lengths)
    expected = sorted(sum(costs[i] for i in group) for group in balance(costs, dp))
    found = sorted(
        sum(costs[i] for micro_batch in micro_batches for i in micro_batch)
        for micro_batches in plan_micro_batches(lengths, dp, 512, costs)
    )
    assert found == pytest.approx(expected)


@given(lengths=st.lists(st.integers(1, 512), max_size=60), dp=st.integers(1, 6), capacity=st.sampled_from([512, 2048]))
@settings(deadline=None)
def test_no_more_waiting_than_in_the_micro_batches_of_first_fit(lengths, dp, capacity):
    costs = flops(lengths)
    plan = plan_micro_batches(lengths, dp, capacity, costs)
    dense = []
    for micro_batches in plan:
        left = sorted((i for micro_batch in micro_batches for i in micro_batch), key=lambda i: (-lengths[i], i))
        used, own = [], []
        for i in left:
            place = next((p for p, tokens in enumerate(used) if tokens + lengths[i] <= capacity), len(used))
            if place == len(used):
                used.append(0)
                own.append(0.0)
            used[place] += lengths[i]
            own[place] += costs[i]
        dense.append(sorted(own + [0.0] * (len(micro_batches) - len(own)), reverse=True))
    ours = [[sum(costs[i] for i in micro_batch) for micro_batch in micro_batches] for micro_batches in plan]
    assert waiting(ours) <= waiting(dense) * (1 + 1e-9)


def test_micro_batches_of_a_rank_are_alike_where_there_is_room():
    """First-fit-decreasing makes 8 and 4 tokens of these."""
    lengths = [5, 3, 3, 1]
    assert sorted(
        sorted(lengths[i] for i in micro_batch) for micro_batch in plan_micro_batches(lengths, 1, 8, lengths)[0]
    ) == [[1, 5], [3, 3]]


def test_micro_batches_without_spare_room_are_packed_by_first_fit():
    """Levelling by cost strands the last sequence here: 6 + 2 and 4 + 2 leave no room for the 3."""
    lengths = [6, 4, 3, 2]
    costs = [6.0, 4.0, 3.0, 2.0]
    (micro_batches,) = plan_micro_batches(lengths, 1, 8, costs)
    assert sorted(sorted(lengths[i] for i in micro_batch) for micro_batch in micro_batches) == [[2, 6], [3, 4]]


def test_costs_and_not_tokens_decide_over_ranks():
    """One long sequence weighs as much as three short ones when attention is what costs."""
    lengths = [300, 173, 173, 173]
    plan = plan_micro_batches(lengths, 2, 1024, [n**2 for n in lengths])
    assert sorted(sorted(i for micro_batch in micro_batches for i in micro_batch) for micro_batches in plan) == [
        [0],
        [1, 2, 3],
    ]
    plan = plan_micro_batches(lengths, 2, 1024, lengths)
    assert sorted(sorted(i for micro_batch in micro_batches for i in micro_batch) for micro_batches in plan) != [
        [0],
        [1, 2, 3],
    ]


def test_nothing_to_do_is_one_empty_micro_batch_per_rank():
    assert plan_micro_batches([], 3, 64, []) == [[[]], [[]], [[]]]
    assert sorted(plan_micro_batches([5], 2, 64, [1.0])) == [[[]], [[0]]]


def test_too_long_sequence_is_refused_with_advice():
    with pytest.raises(UserError, match=r"policy\.micro_batch_tokens=64.*sequence 1 of 70 tokens.*at least 80"):
        plan_micro_batches([10, 70], dp=2, capacity=64, costs=[1, 1], sequence_align=16)
    # A capacity that is not a multiple of the alignment holds only whole ones.
    with pytest.raises(UserError, match=r"policy\.micro_batch_tokens=100.*sequence 0 of 65 tokens.*at least 128"):
        plan_micro_batches([65], dp=1, capacity=100, costs=[1], micro_batch_align=64)


def test_costs_may_be_an_array():
    assert plan_micro_batches([5, 6, 7], 2, 16, np.array([5.0, 6.0, 7.0])) == plan_micro_batches(
        [5, 6, 7], 2, 16, [5, 6, 7]
    )
