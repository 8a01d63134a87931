"""Ranges of flattened values as boxes of the tensor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from megatron_fleet.trainer.megatron import optimizer_shards


@given(st.data())
def test_boxes_hold_the_values_of_a_range_in_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
    limit = data.draw(st.integers(1, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_shards, "BOX_VALUES", limit)
        found = [
            tensor[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
            for offsets, sizes in optimizer_shards.range_boxes(shape, begin, end)
        ]
    assert [value for box in found for value in box.flatten().tolist()] == list(range(begin, end))
    assert all(0 < box.numel() <= limit for box in found)
