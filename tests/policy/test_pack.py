"""Packing: the plan's promises, and the tensors of a row."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megatron_fleet.algorithms.datum import Datum  # noqa: E402
from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.policy.pack import pack_row, plan_rows, unpack_trained  # noqa: E402


@given(
    lengths=st.lists(st.integers(1, 512), max_size=60),
    dp=st.integers(1, 8),
    align=st.sampled_from([1, 2, 16, 128]),
)
def test_plan_keeps_its_promises(lengths, dp, align):
    capacity = 512
    plan = plan_rows(lengths, dp, capacity, align)
    assert len(plan) == dp
    assert len({len(rows) for rows in plan}) == 1 and len(plan[0]) >= 1
    placed = [i for rows in plan for row in rows for i in row]
    assert sorted(placed) == list(range(len(lengths)))
    for rows in plan:
        for row in rows:
            assert sum(-(-lengths[i] // align) * align for i in row) <= capacity
    # First-fit: no rank opens a row while two of its rows would fit into one.
    for rows in plan:
        used = sorted(sum(-(-lengths[i] // align) * align for i in row) for row in rows if row)
        assert len(used) < 2 or used[0] + used[1] > capacity
    assert plan == plan_rows(lengths, dp, capacity, align)


@given(lengths=st.lists(st.integers(1, 512), min_size=1, max_size=60), dp=st.integers(1, 8))
def test_ranks_are_balanced_by_cost(lengths, dp):
    """Longest-first to the least loaded: no two ranks differ by more than the costliest sequence."""

    def cost(n):
        return n * (1 + n / 4096)

    loads = [sum(cost(lengths[i]) for row in rows for i in row) for rows in plan_rows(lengths, dp, 512)]
    assert max(loads) - min(loads) <= cost(max(lengths)) + 1e-6


def test_too_long_sequence_is_refused_with_advice():
    with pytest.raises(UserError, match=r"policy\.row_tokens=64.*sequence 1 of 70 tokens.*at least 80"):
        plan_rows([10, 70], dp=2, capacity=64, align=16)


def datum(tokens, mask, reference=None):
    mask = np.array(mask, np.float32)
    n = len(tokens)
    return Datum(
        token_ids=np.array(tokens, np.int32),
        mask=mask,
        weights=mask * np.arange(n, dtype=np.float32),
        behaviour_logprobs=-mask * np.arange(n, dtype=np.float32),
        reference_logprobs=reference,
    )


def test_row_predicts_each_trained_token_from_the_one_before():
    row = pack_row([datum([5, 6, 7], [0, 0.5, 0.5]), datum([8, 9, 10, 11], [0, 0, 0, 0.25])], capacity=12, align=4)
    assert row.tokens.tolist() == [5, 6, 7, 0, 8, 9, 10, 11, 0, 0, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert (row.lengths, row.filler, row.real_tokens) == ((4, 4), 4, 7)
    assert row.trained.tolist() == [0, 1, 6]
    assert row.targets.tolist() == [6, 7, 11]
    assert row.mask.tolist() == [0.5, 0.5, 0.25]
    assert row.weights.tolist() == [0.5, 1.0, 0.75]
    assert row.behaviour.tolist() == [-0.5, -1.0, -0.75]
    assert row.proximal is None and row.reference is None


def test_empty_row_has_every_optional_field():
    """A loss with a KL term must work on the empty rows that even out the ranks."""
    row = pack_row([], capacity=8)
    assert row.lengths == () and row.filler == 8
    assert row.proximal is not None and row.reference is not None
    assert len(row.trained) == len(row.reference) == 0


def test_unpack_is_the_inverse_of_pack():
    row = [datum([5, 6, 7], [0, 1, 1]), datum([1, 2], [0, 0]), datum([8, 9], [0, 1])]
    back = unpack_trained(row, pack_row(row, 16).weights.numpy())
    for values, d in zip(back, row, strict=True):
        assert np.array_equal(values, d.weights) and values.dtype == np.float32


def test_broken_rows_are_refused():
    with pytest.raises(ValueError, match="cannot hold"):
        pack_row([datum([1, 2, 3], [0, 0, 1])], capacity=2)
    with pytest.raises(ValueError, match="first token"):
        pack_row([datum([1, 2], [1, 0])], capacity=4)
    with pytest.raises(ValueError, match="only 1 of 2"):
        pack_row([datum([1, 2], [0, 1], np.zeros(2, np.float32)), datum([1, 2], [0, 1])], capacity=4)
