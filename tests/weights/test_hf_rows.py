"""Rows of any tensor of any family are what decoding the whole tensor gives."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tiny_models import FAMILIES, dequantise, make, stored_tensors, unstacked  # noqa: E402

from megatron_fleet.weights.floats import cast  # noqa: E402
from megatron_fleet.weights.hf_model import HfModel, Plain, open_model  # noqa: E402
from megatron_fleet.weights.hf_rows import HfReader  # noqa: E402

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@functools.cache
def opened(family, dtype="BF16") -> tuple[HfModel, HfReader, dict[str, torch.Tensor]]:
    folder = make(family, Path(tempfile.mkdtemp()) / family, dtype=DTYPES[dtype])
    model = open_model(folder)
    return model, HfReader(model), unstacked(dequantise(stored_tensors(folder)))


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory):
    """Where `opened` makes its folders."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("families"))
    yield
    tempfile.tempdir = before
    opened.cache_clear()


def floats(reader, tensor, rows):
    return cast(reader.read_rows(tensor, rows), reader.dtype(tensor), "F32")


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_tensors(family):
    model, reader, wide = opened(family)
    for name, shape in model.table.tensors.items():
        read = floats(reader, name, (0, shape[0]))
        assert read.shape == shape and read.dtype == np.float32
        assert np.array_equal(read, wide[name].numpy()), name
        assert reader.width(name) == wide[name][0].numel()


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_other_types_are_kept(dtype):
    model, reader, wide = opened("qwen3_moe", dtype)
    assert {reader.dtype(name) for name in model.table.tensors} == {dtype}
    for name, shape in model.table.tensors.items():
        assert np.array_equal(floats(reader, name, (0, shape[0])), wide[name].numpy())


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_rows_of_any_tensor(data):
    """One after another from one reader: its buffers and its scales are those of the tensor that is read."""
    model, reader, wide = opened(data.draw(st.sampled_from(FAMILIES)))
    quantised = [name for name, encoding in model.encodings.items() if not isinstance(encoding, Plain)]
    for _ in range(3):
        some = quantised if quantised and data.draw(st.booleans()) else list(model.encodings)
        name = data.draw(st.sampled_from(some))
        first = data.draw(st.integers(0, wide[name].shape[0]))
        last = data.draw(st.integers(first, wide[name].shape[0]))
        assert np.array_equal(floats(reader, name, (first, last)), wide[name][first:last].numpy()), (name, first, last)


def test_only_the_rows_are_read():
    model, _, _ = opened("kimi_k2_thinking")
    reader = HfReader(model)
    reader.read_rows("model.embed_tokens.weight", (7, 10))
    assert reader.bytes_read == 3 * 96 * 2
    reader.read_rows("model.layers.1.mlp.experts.0.up_proj.weight", (5, 9))
    assert reader.bytes_read == 3 * 96 * 2 + 4 * (96 // 2 + 96 // 32 * 2)


def test_scales_of_blocks_are_read_once():
    model, _, _ = opened("deepseek_v3_fp8")
    reader, name = HfReader(model), "model.layers.0.mlp.up_proj.weight"
    for first in range(0, 208, 52):
        reader.read_rows(name, (first, first + 52))
    assert reader.bytes_read == 208 * 192 + 2 * 2 * 4
