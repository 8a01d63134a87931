"""The tensors of a packed micro-batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megatron_fleet.algorithms.datum import Datum  # noqa: E402
from megatron_fleet.algorithms.loss_inputs import LossInputs  # noqa: E402
from megatron_fleet.trainer.packing.pack import micro_batch_width, pack_micro_batch, unpack_trained  # noqa: E402


def datum(tokens, scale, reference=None):
    """``scale``: of each token, 0 where it is not trained."""
    scale = np.array(scale, np.float32)
    n = len(tokens)
    return Datum(
        token_ids=np.array(tokens, np.int32),
        loss_mask=scale != 0,
        scaled_advantages=scale * np.arange(n, dtype=np.float32),
        behaviour_logprobs=-scale * np.arange(n, dtype=np.float32),
        loss_scale=float(scale.max(initial=0)),
        arrays={} if reference is None else {"reference": reference},
    )


def test_micro_batch_predicts_each_trained_token_from_the_one_before():
    data = [datum([5, 6, 7], [0, 0.5, 0.5]), datum([8, 9, 10, 11], [0, 0, 0, 0.25])]
    data = [replace(d, arrays={"own": np.arange(len(d), dtype=np.int32)}) for d in data]
    data[0].extras = {"adapter": "b"}
    packed = pack_micro_batch(data, 12, sequence_align=4)
    assert packed.tokens.tolist() == [5, 6, 7, 0, 8, 9, 10, 11, 0, 0, 0, 0]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert packed.real.tolist() == [True] * 3 + [False] + [True] * 4 + [False] * 4
    assert (packed.lengths, packed.filler, packed.real_tokens) == ((4, 4), 4, 7)
    assert packed.trained.tolist() == [0, 1, 6]
    assert packed.targets.tolist() == [6, 7, 11]
    assert packed.sequence.tolist() == [0, 0, 1]
    assert packed.loss_scale.tolist() == [0.5, 0.5, 0.25]
    assert {name: values.tolist() for name, values in packed.arrays.items()} == {"own": [1, 2, 3]}
    assert packed.extras == ((slice(0, 3), {"adapter": "b"}),)
    assert packed.scaled_advantages.tolist() == [0.5, 1.0, 0.75]
    assert packed.behaviour.tolist() == [-0.5, -1.0, -0.75]


lengths_of_trained = st.integers(0, 20).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(1, max(1, n - 1)), max_size=0 if n < 2 else n - 1))
)


@given(
    sequences=st.lists(lengths_of_trained, max_size=6),
    sequence_align=st.sampled_from([1, 4]),
    wider=st.integers(0, 9),
)
@settings(deadline=None)
def test_a_micro_batch_keeps_its_promises(sequences, sequence_align, wider):
    """Every field, token by token, from the sequences themselves."""
    data = [
        datum(list(range(100 * i, 100 * i + n)), [float(t in mask) for t in range(n)])
        for i, (n, mask) in enumerate(sequences)
    ]
    width = micro_batch_width([len(d) for d in data], sequence_align, 16) + wider
    packed = pack_micro_batch(data, width, sequence_align)
    assert (
        {len(x) for x in (packed.tokens, packed.positions, packed.real)}
        == {width}
        == {sum(packed.lengths) + packed.filler}
    )
    assert all(length % sequence_align == 0 for length in packed.lengths)
    assert packed.real.sum() == packed.real_tokens == sum(map(len, data))
    assert packed.tokens[packed.real].tolist() == [t for d in data for t in d.token_ids]
    assert packed.positions[packed.real].tolist() == [t for d in data for t in range(len(d))]
    assert not packed.tokens[~packed.real].any()
    expected = [(i, 100 * i + t) for i, (_, mask) in enumerate(sequences) for t in sorted(mask)]
    assert list(zip(packed.sequence.tolist(), packed.targets.tolist(), strict=True)) == expected
    assert packed.tokens[packed.trained + 1].tolist() == packed.targets.tolist()
    assert packed.real[packed.trained].all() and packed.real[packed.trained + 1].all()
    assert {
        x.dtype
        for x in (
            packed.tokens,
            packed.positions,
            packed.trained,
            packed.targets,
            packed.sequence,
        )
    } == {torch.int64}
    assert packed.real.dtype == torch.bool


def test_a_micro_batch_is_as_wide_as_it_must_be():
    assert micro_batch_width([3, 4]) == 7
    assert micro_batch_width([3, 4, 8], sequence_align=4) == 16
    assert micro_batch_width([3, 4, 9], sequence_align=4, micro_batch_align=32) == 32
    assert micro_batch_width([30, 3], sequence_align=4, micro_batch_align=32) == 64
    assert micro_batch_width([], sequence_align=4, micro_batch_align=32) == micro_batch_width([0], 4, 32) == 32
    assert micro_batch_width([]) == 1


def test_an_empty_micro_batch_has_every_array():
    """A loss with a KL term must work on the empty micro-batches that even out the ranks."""
    packed = pack_micro_batch([], 8)
    assert packed.lengths == () and packed.filler == 8 and not packed.real.any()
    assert len(packed.trained) == len(packed.sequence) == 0
    nothing = packed.scaled_advantages
    x = LossInputs(nothing, nothing, nothing, nothing, nothing, packed.sequence, 0, packed.arrays)
    assert len(x.proximal) == len(x.reference) == len(x.array("own")) == 0


def test_unpack_is_the_inverse_of_pack():
    micro_batch = [datum([5, 6, 7], [0, 1, 1]), datum([1, 2], [0, 0]), datum([8, 9], [0, 1])]
    back = unpack_trained(micro_batch, pack_micro_batch(micro_batch, 16).scaled_advantages.numpy())
    for values, d in zip(back, micro_batch, strict=True):
        assert np.array_equal(values, d.scaled_advantages) and values.dtype == np.float32


def test_broken_micro_batches_are_refused():
    with pytest.raises(ValueError, match="cannot hold"):
        pack_micro_batch([datum([1, 2, 3], [0, 0, 1])], width=2)
    with pytest.raises(ValueError, match="first token"):
        pack_micro_batch([datum([1, 2], [1, 0])], width=4)
    with pytest.raises(ValueError, match="only 1 of 2 sequences have an array reference"):
        pack_micro_batch([datum([1, 2], [0, 1], np.zeros(2, np.float32)), datum([1, 2], [0, 1])], width=4)
