"""Rotary embedding of packed sequences: Megatron's values, without reading from the device."""

from __future__ import annotations

import importlib.util
import sys

import pytest

pytest.importorskip("megatron_fleet.platform.megatron")

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from megatron_fleet.platform.megatron.attention import local_tokens
from megatron_fleet.platform.megatron.rotary import packed_positions

LENGTHS = (8, 24, 16)


class Ranks:
    """A context-parallel group as seen by one of its ranks."""

    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


@pytest.fixture(scope="module")
def upstream():
    """Megatron's module as it is, without our patch."""
    spec = importlib.util.spec_from_file_location("rope_utils_of_megatron", rope_utils.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def ends(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 1), (4, 3)])
def test_positions_are_those_of_the_ranks_tokens(size, rank):
    whole = torch.cat([torch.arange(n) for n in LENGTHS])
    expected = whole[torch.from_numpy(local_tokens(LENGTHS, size, rank))]
    assert torch.equal(packed_positions(ends(LENGTHS), sum(LENGTHS) // size, size, rank), expected)


def test_lengths_need_no_alignment_on_one_rank():
    expected = torch.cat([torch.arange(n) for n in (5, 1, 9)])
    assert torch.equal(packed_positions(ends((5, 1, 9)), 15, 1, 0), expected)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize(("interleaved", "latent"), [(False, False), (True, False), (False, True)])
def test_values_are_megatrons_bit_for_bit(upstream, size, dtype, rotated, interleaved, latent):
    torch.manual_seed(0)
    group = Ranks(size, size - 1)
    freqs = torch.randn(max(LENGTHS), 1, 1, rotated)
    query, key = (torch.randn(sum(LENGTHS) // size, heads, 8, dtype=dtype) for heads in (3, 1))
    given = {"rotary_interleaved": interleaved, "multi_latent_attention": latent, "cp_group": group}
    shared = ends(LENGTHS)
    for tensor in (query, key):
        for scale in (1.0, 1.25):
            expected = upstream._apply_rotary_pos_emb_thd(tensor, ends(LENGTHS), freqs, mscale=scale, **given)
            got = rope_utils._apply_rotary_pos_emb_thd(tensor, shared, freqs, mscale=scale, **given)
            assert torch.equal(got, expected) and got.dtype == dtype
    other = freqs + 1  # another table with the same sequences, as models with two kinds of layers have
    expected = upstream._apply_rotary_pos_emb_thd(query, ends(LENGTHS), other, **given)
    assert torch.equal(rope_utils._apply_rotary_pos_emb_thd(query, shared, other, **given), expected)


def test_factors_are_computed_once_for_all_layers(monkeypatch):
    calls = []
    cos = torch.cos
    monkeypatch.setattr(torch, "cos", lambda x: calls.append(x) or cos(x))
    shared, freqs = ends(LENGTHS), torch.randn(max(LENGTHS), 1, 1, 8)
    for _ in range(5):
        rope_utils._apply_rotary_pos_emb_thd(torch.randn(48, 2, 8), shared, freqs, cp_group=Ranks(1, 0))
    assert len(calls) == 1


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_is_read_back(upstream, size):
    """Fake tensors have no values: reading one, which on a GPU waits for it, is an error."""
    group = Ranks(size, 0)
    with FakeTensorMode():
        query, freqs = torch.randn(48 // size, 2, 8), torch.randn(24, 1, 1, 8)
        assert rope_utils._apply_rotary_pos_emb_thd(query, ends(LENGTHS), freqs, cp_group=group).shape == query.shape
        with pytest.raises(DataDependentOutputException):
            upstream._apply_rotary_pos_emb_thd(query, ends(LENGTHS), freqs, cp_group=group)
