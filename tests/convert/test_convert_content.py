"""The bytes of output files do not depend on the windows in which they are asked for, nor memory on their size."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("torch")

from convert_helpers import ArrayReader, Made
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.convert import content
from megatron_fleet.convert.content import (
    FileRange,
    Fp8Codes,
    Fp8Scales,
    Int4Codes,
    Int4Scales,
    TensorRows,
)
from megatron_fleet.convert.plan import Bytes, OutputFile
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.hf_rows import Fp8Weights, Hint, Int4Weights, PerThread
from megatron_fleet.weights.quant import fp8, int4


@st.composite
def made_rows(draw):
    granule = draw(st.sampled_from([1, 2, 5]))
    return Made(draw(st.integers(0, 23)), draw(st.integers(0, 9)), granule, draw(st.sampled_from([0, 1, 30, 1000])))


contents = st.one_of(st.binary(max_size=12).map(Bytes), made_rows())


def whole(part):
    return part.data if isinstance(part, Bytes) else part.whole.tobytes()


@settings(max_examples=300, deadline=None)
@given(st.lists(contents, max_size=7), st.data())
def test_any_window_of_a_file_is_that_part_of_it(parts, data):
    file = OutputFile("f")
    expected = b"".join(whole(part) for part in parts)
    starts = [file.append(part) for part in parts]
    assert starts == list(itertools.accumulate((len(whole(p)) for p in parts), initial=0))[: len(parts)]
    assert file.size == len(expected)
    start = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(start, len(expected)))
    original, content.STEP_BYTES = content.STEP_BYTES, 64
    try:
        out = bytearray(b"\xa5" * (end - start + 2))
        file.fill(start, memoryview(out)[1:-1])
    finally:
        content.STEP_BYTES = original
    assert out == b"\xa5" + expected[start:end] + b"\xa5"


def test_a_window_asks_for_the_rows_it_needs_and_no_more():
    rows = Made(20, 10, 4, 1)
    rows.fill(95, memoryview(bytearray(30)))
    assert rows.asked == [(8, 16)]


def quantised_contents():
    """Contents of quantised forms over random weights of awkward shape, and all their bytes made at once."""
    random = np.random.default_rng(5)
    weights = (random.standard_normal((300, 160)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    readers = ArrayReader({"w": weights}, {"w": "BF16"}).for_threads()
    scales = fp8.block_scales(weights)
    codes = np.empty(weights.shape, np.uint8)
    fp8.quantize(weights, scales, codes)
    eight = Fp8Weights(readers, "w", weights.shape, None, False)
    four_scales, _ = int4.choose_scales(weights)
    packed = np.empty((300, 20), np.int32)
    int4.quantize(weights, four_scales, packed)
    four = Int4Weights(readers, "w", weights.shape, None)
    wide = (weights[40:290].astype(np.uint32) << 16).view(np.float32)
    return [
        (Fp8Codes(eight), codes),
        (Fp8Scales(eight), scales),
        (Int4Codes(four), packed),
        (Int4Scales(four), four_scales),
        (TensorRows(readers, "w", (40, 290), 160, "F32"), wide),
    ]


@pytest.mark.parametrize("step", [1, 10_000, 1 << 20])
def test_quantised_rows_do_not_depend_on_the_window(step, monkeypatch):
    monkeypatch.setattr(content, "STEP_BYTES", step)
    random = np.random.default_rng(1)
    for made, expected in quantised_contents():
        data = expected.tobytes()
        assert made.nbytes == len(data)
        for start, end in [(0, len(data)), *np.sort(random.integers(0, len(data) + 1, (4, 2)), axis=1)]:
            out = bytearray(int(end - start))
            made.fill(int(start), memoryview(out))
            assert out == data[start:end]


@pytest.mark.parametrize("kind", ["fp8 codes", "fp8 scales", "int4 codes", "int4 scales", "floats"])
def test_a_wide_tensor_stays_within_few_rows(kind):
    """128 rows of 18,432 columns, four times over; what is in memory is a step, not the tensor."""
    width = 18_432

    class Zeros:
        def dtype(self, tensor):
            return "BF16"

        def read_rows(self, tensor, rows):
            return np.zeros((rows[1] - rows[0], width), np.uint16)

    readers = PerThread(Zeros)
    shape = (512 * 8, width)
    eight, four = Fp8Weights(readers, "w", shape, None, False), Int4Weights(readers, "w", shape, None)
    made = {
        "fp8 codes": Fp8Codes(eight),
        "fp8 scales": Fp8Scales(eight),
        "int4 codes": Int4Codes(four),
        "int4 scales": Int4Scales(four),
        "floats": TensorRows(readers, "w", (0, shape[0]), width, "F32"),
    }[kind]
    out = memoryview(bytearray(min(made.nbytes, 16 << 20)))
    made.fill(0, out[:1000])  # compiles
    tracemalloc.start()
    made.fill(0, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 << 20


def test_scales_of_the_source_are_read_for_the_rows_asked_for(tmp_path):
    scales = np.arange(40, dtype=np.uint16).reshape(10, 4)
    (tmp_path / "f").write_bytes(b"head" + scales.tobytes())
    hint = Hint(open_folder(tmp_path), "f", 4, scales.shape)
    assert np.array_equal(hint.rows((3, 7), np.uint16), scales[3:7])


def test_a_range_of_a_file(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(100)))
    out = bytearray(5)
    FileRange(open_folder(tmp_path), "f", 10, 50).fill(7, memoryview(out))
    assert out == bytes(range(17, 22))
