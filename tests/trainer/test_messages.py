"""What the controller sends to ranks: every field that they read, and little more than that."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from policy_fixtures import make_batch

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.cluster import frames
from megatron_fleet.trainer.messages import datum_from_plain, datum_to_plain


def sent(datum: Datum) -> tuple[Datum, int]:
    """The Datum as a rank has it, and the bytes of its message."""
    body = frames.body("micro-batch", datum_to_plain(datum))
    return datum_from_plain(frames.unpack(body)[1]), len(body)


def every_field(datum: Datum) -> Datum:
    mask, n = datum.loss_mask, len(datum)
    return replace(
        datum,
        arrays={
            "proximal": np.where(mask, np.float32(-2), np.float32(0)),
            "own": np.where(mask, 1, 0).astype(np.int32),
        },
        extras={
            "routing": np.arange(n * 6, dtype=np.uint8).reshape(n, 3, 2),
            "adapter": "b",
            "image": {"digest": "ab", "place": [1, 4], "grid": [2, 2]},
        },
    )


@pytest.mark.parametrize("change", [lambda datum: datum, every_field])
def test_a_rank_gets_every_field_as_it_was(change):
    for datum in map(change, make_batch(5)):
        found, _ = sent(datum)
        for field in fields(Datum):
            was, is_ = getattr(datum, field.name), getattr(found, field.name)
            wases, ises = (x if isinstance(x, dict) else {"": x} for x in (was, is_))
            assert wases.keys() == ises.keys()
            for name, value in wases.items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(ises[name], value, strict=True)
                else:
                    assert ises[name] == value


def test_a_sequence_that_trains_nothing():
    tokens, zeros = np.arange(7, dtype=np.int32), np.zeros(7, np.float32)
    found, _ = sent(Datum(tokens, np.zeros(7, bool), zeros, zeros))
    assert not found.loss_mask.any() and len(found.behaviour_logprobs) == 7


def test_untrained_tokens_cost_their_id_and_a_bit():
    n, trained = 4096, 512
    values = np.zeros(n, np.float32)
    values[-trained:] = 1
    _, size = sent(Datum(np.zeros(n, np.int32), values > 0, values, values))
    least = 4 * n + n // 8 + 2 * 4 * trained
    assert least <= size < least + 200
