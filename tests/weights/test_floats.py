"""Conversions between float types agree with torch, bit for bit."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from megatron_fleet.weights.floats import FLOATS, cast, numpy_type, widest  # noqa: E402

TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BITS = {"F32": torch.int32, "BF16": torch.int16, "F16": torch.int16}


def every_float(dtype):
    """All 16-bit floats; of float32 every upper half with lower halves at, and next to, what decides a rounding."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    if dtype != "F32":
        return upper.to(torch.int16).view(TORCH[dtype])
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return ((upper[:, None] << 16) | lower).flatten().to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOATS, FLOATS)))
def test_casts_are_those_of_torch(source, target):
    """Subnormals, ties, overflow, signed zeros and infinities included; a NaN stays one."""
    values = every_float(source)
    expected = values.to(TORCH[target])
    array = values.view(BITS[source]).numpy().view(numpy_type(source))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = cast(array, source, target)
    assert out.dtype == numpy_type(target) and out.shape == array.shape
    ours = torch.from_numpy(out.view(np.int32 if target == "F32" else np.int16)).view(TORCH[target])
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.view(BITS[target])[~nan], expected.view(BITS[target])[~nan])
    assert torch.equal(ours.signbit()[nan], values.signbit()[nan])


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_types_are_not_copied(dtype):
    array = np.zeros((2, 3), numpy_type(dtype))
    assert cast(array, dtype, dtype) is array


def test_rows_that_are_not_contiguous():
    values = np.linspace(-3, 3, 60, dtype=np.float32).reshape(6, 10)[::2, 1::3]
    assert (cast(values, "F32", "BF16") == cast(values.copy(), "F32", "BF16")).all()


@pytest.mark.parametrize("dtypes", list(itertools.product(FLOATS, repeat=2)))
def test_the_widest_type_holds_the_values_of_all(dtypes):
    both = widest(list(dtypes))
    assert both == (dtypes[0] if dtypes[0] == dtypes[1] else "F32")


def test_types_that_are_never_looked_at_keep_their_width():
    names = ("BOOL", "F8_E4M3", "U16", "I32", "F64")
    assert [np.dtype(numpy_type(name)).itemsize for name in names] == [1, 1, 2, 4, 8]
