"""Containers: ours as torch reads them, torch's as we read them, and everything else refused."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_dist_files import ALL_DTYPES, random_tensor, raw_bytes, torch_saved

from megatron_fleet.config.errors import UserError
from megatron_fleet.weights.torch_dist import container
from megatron_fleet.weights.torch_dist.dtypes import BY_TORCH_NAME

SHAPES = [(), (0,), (5,), (2, 3), (3, 0, 2), (4, 1, 70), (1, 2, 1, 3, 2)]


def span_of(saved: bytes) -> container.ByteRange:
    return container.data_span(saved[: container.HEAD_BYTES], len(saved), "file: key")


def data_of(saved: bytes) -> bytes:
    span = span_of(saved)
    return saved[span.offset : span.offset + span.nbytes]


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_torch_reads_our_containers_and_we_read_both(name):
    dtype = BY_TORCH_NAME[name]
    for shape in SHAPES:
        expected = random_tensor(getattr(torch, dtype.torch), *shape)
        ours = container.wrap(dtype.name, shape)
        saved = ours.prefix + raw_bytes(expected) + ours.suffix
        assert len(saved) == ours.length
        assert len(ours.prefix) % 64 == 0

        loaded = torch.load(io.BytesIO(saved), weights_only=True)
        assert (loaded.dtype, loaded.shape, raw_bytes(loaded)) == (expected.dtype, expected.shape, raw_bytes(expected))
        assert loaded.is_contiguous()
        for version in (saved, torch_saved(expected)):
            span = span_of(version)
            assert (span.dtype, span.shape, data_of(version)) == (dtype.name, shape, raw_bytes(expected))


def test_strides_and_offsets_of_torch():
    tensor = random_tensor(torch.bfloat16, 6, 4, 3)
    for view in (tensor[2:4], tensor[5], tensor[5, 1:3, :], tensor[:1, 1:2], tensor[:, :1, :1][:1]):
        assert data_of(torch_saved(view)) == raw_bytes(view)
    # An axis of length 1 may have any stride, and so may all of an empty tensor.
    odd = tensor.as_strided((1, 4, 1, 3), (99, 3, 77, 1))
    assert data_of(torch_saved(odd)) == raw_bytes(odd)
    assert span_of(torch_saved(tensor[:0].transpose(0, 2))).nbytes == 0
    for scattered in (tensor.transpose(0, 1), tensor[:, 1:3], tensor[0].t(), tensor[:1, :1].expand(2, 1, 3)):
        with pytest.raises(UserError, match="not contiguous"):
            span_of(torch_saved(scattered))


def test_containers_of_early_versions_and_other_names():
    """torch 1.6 to 2.0 wrote fewer records; the archive's folder was once named after the file."""
    tensor = random_tensor(torch.float32, 4, 5)
    with zipfile.ZipFile(io.BytesIO(torch_saved(tensor))) as z:
        pickled = z.read("archive/data.pkl")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as z:
        z.writestr("model/data.pkl", pickled.replace(b"X\1\0\0\0" + b"0", b"X\2\0\0\0" + b"94"))
        z.writestr("model/data/94", raw_bytes(tensor))
        z.writestr("model/version", "3\n")
    assert data_of(out.getvalue()) == raw_bytes(tensor)
    # Data that looks like the end of a record does not end it.
    trap = torch.frombuffer(bytearray(b"PK\7\x08PK\3\4PK\1\2" * 8), dtype=torch.uint8)
    assert data_of(torch_saved(trap)) == raw_bytes(trap)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([torch.zeros(2)], "holds list, no plain tensor"),
        ({"a": 1}, "no tensor data|no plain tensor"),
        (torch.nn.Parameter(torch.zeros(2)), "_rebuild_parameter"),
        (torch.zeros(2).as_subclass(Subclass), "Subclass.*do not trust"),
        (torch.zeros(3).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.zeros(2, dtype=torch.complex128), "ComplexDoubleStorage"),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugation"),
        (torch.zeros(2, device="meta"), "no plain tensor"),
    ],
)
def test_what_is_no_plain_tensor(value, said):
    with pytest.raises(UserError, match=f"file: key .*({said})"):
        span_of(torch_saved(value))


def test_broken_containers():
    saved = torch_saved(random_tensor(torch.float32, 1000))
    compressed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as z, zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as out:
        for name in z.namelist():
            out.writestr(name, z.read(name))
    legacy = io.BytesIO()
    torch.save(torch.zeros(3), legacy, _use_new_zipfile_serialization=False)
    for broken, said in [
        (saved[:4000], "is cut off: 4000 bytes of data"),
        (compressed.getvalue(), "compressed"),
        (legacy.getvalue(), "not a file of torch.save"),
        (b"", "not a file of torch.save"),
        (torch_saved(torch.zeros(5)).replace(b"K\5tq", b"K\4tq"), "20 bytes in a storage of 16"),
        (saved.replace(b"little", b"big..."), "big-endian"),
    ]:
        with pytest.raises(UserError, match=said):
            span_of(broken)
    with pytest.raises(UserError, match="within the bytes read"):
        container.data_span(saved[:300], len(saved), "x")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_heads_are_refused_or_stay_inside(data):
    saved = torch_saved(torch.arange(6, dtype=torch.bfloat16).view(2, 3))
    damaged = bytearray(saved)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 640))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    head = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    try:
        span = container.data_span(head, len(saved), "x")
    except UserError:
        return
    assert 0 <= span.offset <= span.offset + span.nbytes <= len(saved)


def test_a_container_of_more_than_4_gib(tmp_path):
    shape = (1 << 16, 1 << 15)
    around = container.wrap("BF16", shape)
    path = tmp_path / "sparse.pt"
    with path.open("wb") as f:
        f.write(around.prefix + b"\1\2")
        f.seek(len(around.prefix) + around.nbytes - 2)
        f.write(b"\3\4" + around.suffix)
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert (tensor.shape, tensor.dtype) == (shape, torch.bfloat16)
    assert raw_bytes(tensor[0, :1]) == b"\1\2"
    assert raw_bytes(tensor[-1, -1:]) == b"\3\4"
    with zipfile.ZipFile(path) as z:
        assert z.getinfo("archive/data/0").file_size == around.nbytes
    with path.open("rb") as f:
        span = container.data_span(f.read(container.HEAD_BYTES), around.length, "x")
    assert (span.offset, span.nbytes, span.shape) == (len(around.prefix), around.nbytes, shape)
