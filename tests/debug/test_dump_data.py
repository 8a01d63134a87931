"""Data on disk: every field of every Datum comes back bit for bit."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.debug.dumps import load_data, save_data


def full_datum(tokens: int, seed: int) -> Datum:
    """Every field that there is has values, whatever Datum will grow."""
    rng = np.random.default_rng(seed)
    values = {f.name: rng.normal(size=tokens).astype(np.float32) for f in fields(Datum)}
    values["token_ids"] = rng.integers(0, 2**31, tokens).astype(np.int32)
    values["routing"] = rng.integers(-1, 300, (tokens, 3, 2)).astype(np.int16)
    return Datum(**values)


def assert_equal(a: Datum, b: Datum) -> None:
    for field in fields(Datum):
        one, two = getattr(a, field.name), getattr(b, field.name)
        if one is None:
            assert two is None, field.name
        else:
            assert (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes()), field.name


@pytest.mark.parametrize("count", [0, 1, 5])
def test_data_come_back_bit_for_bit(tmp_path, count):
    data = [full_datum(5 + 7 * i, seed=i) for i in range(count)]
    save_data(tmp_path / "data.npz", data)
    for one, two in zip(data, load_data(tmp_path / "data.npz"), strict=True):
        assert_equal(one, two)


def test_values_that_are_not_finite_and_fields_that_are_missing(tmp_path):
    bad = full_datum(9, 0)
    bad.scaled_advantages[4], bad.behaviour_logprobs[:2] = np.nan, (np.inf, -np.inf)
    some = replace(full_datum(4, 1), routing=None, proximal_logprobs=None)
    data = [replace(datum, reference_logprobs=None) for datum in (some, bad, some)]
    save_data(tmp_path / "data.npz", data)
    for one, two in zip(data, load_data(tmp_path / "data.npz"), strict=True):
        assert_equal(one, two)


def test_a_field_that_could_not_be_read_back_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"Datum\.scaled_advantages is a list"):
        save_data(tmp_path / "data.npz", [replace(full_datum(3, 0), scaled_advantages=[1.0, 2.0, 3.0])])
