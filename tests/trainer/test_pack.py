"""The tensors of a packed row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megatron_fleet.algorithms.datum import Datum  # noqa: E402
from megatron_fleet.trainer.packing.pack import pack_row, row_width, unpack_trained  # noqa: E402


def datum(tokens, mask, reference=None):
    mask = np.array(mask, np.float32)
    n = len(tokens)
    return Datum(
        token_ids=np.array(tokens, np.int32),
        loss_scale=mask,
        scaled_advantages=mask * np.arange(n, dtype=np.float32),
        behaviour_logprobs=-mask * np.arange(n, dtype=np.float32),
        reference_logprobs=reference,
    )


def test_row_predicts_each_trained_token_from_the_one_before():
    data = [datum([5, 6, 7], [0, 0.5, 0.5]), datum([8, 9, 10, 11], [0, 0, 0, 0.25])]
    data = [replace(d, staleness=np.arange(len(d), dtype=np.int32)) for d in data]
    row = pack_row(data, 12, sequence_align=4)
    assert row.tokens.tolist() == [5, 6, 7, 0, 8, 9, 10, 11, 0, 0, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert row.real.tolist() == [True] * 3 + [False] + [True] * 4 + [False] * 4
    assert (row.lengths, row.filler, row.real_tokens) == ((4, 4), 4, 7)
    assert row.trained.tolist() == [0, 1, 6]
    assert row.targets.tolist() == [6, 7, 11]
    assert row.sequence.tolist() == [0, 0, 1]
    assert row.loss_scale.tolist() == [0.5, 0.5, 0.25]
    assert row.staleness.tolist() == [1, 2, 3]
    assert row.scaled_advantages.tolist() == [0.5, 1.0, 0.75]
    assert row.behaviour.tolist() == [-0.5, -1.0, -0.75]
    assert row.proximal is None and row.reference is None


lengths_of_trained = st.integers(0, 20).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(1, max(1, n - 1)), max_size=0 if n < 2 else n - 1))
)


@given(rows=st.lists(lengths_of_trained, max_size=6), sequence_align=st.sampled_from([1, 4]), wider=st.integers(0, 9))
@settings(deadline=None)
def test_a_row_keeps_its_promises(rows, sequence_align, wider):
    """Every field, token by token, from the sequences themselves."""
    data = [
        datum(list(range(100 * i, 100 * i + n)), [float(t in mask) for t in range(n)])
        for i, (n, mask) in enumerate(rows)
    ]
    width = row_width([len(d) for d in data], sequence_align, 16) + wider
    row = pack_row(data, width, sequence_align)
    assert {len(x) for x in (row.tokens, row.positions, row.real)} == {width} == {sum(row.lengths) + row.filler}
    assert all(length % sequence_align == 0 for length in row.lengths)
    assert row.real.sum() == row.real_tokens == sum(map(len, data))
    assert row.tokens[row.real].tolist() == [t for d in data for t in d.token_ids]
    assert row.positions[row.real].tolist() == [t for d in data for t in range(len(d))]
    assert not row.tokens[~row.real].any()
    expected = [(i, 100 * i + t) for i, (_, mask) in enumerate(rows) for t in sorted(mask)]
    assert list(zip(row.sequence.tolist(), row.targets.tolist(), strict=True)) == expected
    assert row.tokens[row.trained + 1].tolist() == row.targets.tolist()
    assert row.real[row.trained].all() and row.real[row.trained + 1].all()
    assert {x.dtype for x in (row.tokens, row.positions, row.trained, row.targets, row.sequence)} == {torch.int64}
    assert row.real.dtype == torch.bool


def test_a_row_is_as_wide_as_it_must_be():
    assert row_width([3, 4]) == 7
    assert row_width([3, 4, 8], sequence_align=4) == 16
    assert row_width([3, 4, 9], sequence_align=4, row_align=32) == 32
    assert row_width([30, 3], sequence_align=4, row_align=32) == 64
    assert row_width([], sequence_align=4, row_align=32) == row_width([0], 4, 32) == 32
    assert row_width([]) == 1


def test_empty_row_has_every_optional_field():
    """A loss with a KL term must work on the empty rows that even out the ranks."""
    row = pack_row([], 8)
    assert row.lengths == () and row.filler == 8 and not row.real.any()
    assert row.proximal is not None and row.reference is not None
    assert len(row.trained) == len(row.reference) == len(row.sequence) == 0


def test_unpack_is_the_inverse_of_pack():
    row = [datum([5, 6, 7], [0, 1, 1]), datum([1, 2], [0, 0]), datum([8, 9], [0, 1])]
    back = unpack_trained(row, pack_row(row, 16).scaled_advantages.numpy())
    for values, d in zip(back, row, strict=True):
        assert np.array_equal(values, d.scaled_advantages) and values.dtype == np.float32


def test_broken_rows_are_refused():
    with pytest.raises(ValueError, match="cannot hold"):
        pack_row([datum([1, 2, 3], [0, 0, 1])], width=2)
    with pytest.raises(ValueError, match="first token"):
        pack_row([datum([1, 2], [1, 0])], width=4)
    with pytest.raises(ValueError, match="only 1 of 2"):
        pack_row([datum([1, 2], [0, 1], np.zeros(2, np.float32)), datum([1, 2], [0, 1])], width=4)
