"""Our count of an image's tokens against transformers' own image processor."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import PIL.Image
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron_fleet.models.images import MAX_ASPECT
from megatron_fleet.models.qwen3.vision import QwenVision

sides = st.one_of(st.integers(1, 120), st.integers(1, 5000))
shapes = st.sampled_from([(14, 2), (16, 2), (8, 1)])


@settings(max_examples=300, deadline=None)
@given(sides, sides, shapes, st.integers(1, 300), st.integers(0, 20_000))
def test_tokens_are_those_of_the_models_image_processor(width, height, shape, least, more):
    patch, merge = shape
    unit = (patch * merge) ** 2
    limits = least * unit, (least + more) * unit
    vision = QwenVision(0, (), patch, merge, *limits)
    if max(width, height) > MAX_ASPECT * min(width, height):
        return  # never shown, see ``readable``
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=merge, size={"shortest_edge": limits[0], "longest_edge": limits[1]}
    )
    assert vision.tokens(width, height) == processor.get_number_of_image_patches(height, width) // merge**2


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (31, 200), (5, 3)])
def test_an_image_really_gives_so_many(width, height):
    size = {"shortest_edge": 4 * 32 * 32, "longest_edge": 100 * 32 * 32}
    processor = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, size=size)
    grid = processor(PIL.Image.new("RGB", (width, height)), return_tensors="np")["image_grid_thw"][0]
    assert QwenVision(0, (), 16, 2, *size.values()).tokens(width, height) == math.prod(grid) // 4
