"""Data on disk: every field of every Datum comes back bit for bit."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.debug.dumps import load_data, save_data


def full_datum(tokens: int, seed: int) -> Datum:
    """A Datum with everything that it may have."""
    rng = np.random.default_rng(seed)
    advantages, logprobs, proximal, reference = (rng.normal(size=tokens).astype(np.float32) for _ in range(4))
    return Datum(
        rng.integers(0, 2**31, tokens).astype(np.int32),
        rng.random(tokens) < 0.5,
        advantages,
        logprobs,
        loss_scale=1 / 3,
        arrays={"proximal": proximal, "reference": reference},
        extras={"routing": rng.integers(-1, 300, (tokens, 3, 2)).astype(np.int16), "image": {"grid": [2, 3]}},
    )


def flat(datum: Datum) -> dict[str, object]:
    """Values by field, and by name within it; of an array its type, shape and bytes."""
    fields_of = {f.name: getattr(datum, f.name) for f in fields(Datum)}
    values = {(f, n): v for f, x in fields_of.items() for n, v in (x if isinstance(x, dict) else {"": x}).items()}
    return {key: (v.dtype, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for key, v in values.items()}


def assert_equal(a: Datum, b: Datum) -> None:
    assert flat(a) == flat(b)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_data_come_back_bit_for_bit(tmp_path, count):
    data = [full_datum(5 + 7 * i, seed=i) for i in range(count)]
    save_data(tmp_path / "data.npz", data)
    for one, two in zip(data, load_data(tmp_path / "data.npz"), strict=True):
        assert_equal(one, two)


def test_values_that_are_not_finite_and_fields_that_are_missing(tmp_path):
    bad = full_datum(9, 0)
    bad.scaled_advantages[4], bad.behaviour_logprobs[:2] = np.nan, (np.inf, -np.inf)
    some = replace(full_datum(4, 1), arrays={}, extras={})
    data = [some, bad, some]
    save_data(tmp_path / "data.npz", data)
    for one, two in zip(data, load_data(tmp_path / "data.npz"), strict=True):
        assert_equal(one, two)


def test_a_field_that_could_not_be_read_back_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"Datum\.scaled_advantages is a list"):
        save_data(tmp_path / "data.npz", [replace(full_datum(3, 0), scaled_advantages=[1.0, 2.0, 3.0])])


def test_data_of_an_older_version_say_so(tmp_path):
    """There, the mask was the normaliser."""
    old = {"sequences": 1, "token_ids": [1, 2], "token_ids.lengths": [2], "loss_scale": [0.0, 1.0]}
    np.savez(tmp_path / "data.npz", **old, **{"loss_scale.lengths": [2]})
    with pytest.raises(UserError, match="was written by an older version; replay the dump with that version"):
        load_data(tmp_path / "data.npz")
