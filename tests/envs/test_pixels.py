"""Arrays of pixels in what a server sends become images, and nothing else does."""

import io
import random

import PIL.Image
import pytest

from megatron_fleet.envs.base import Image
from megatron_fleet.envs.content import read_content
from megatron_fleet.envs.pixels import MAX_DEPTH, MIN_SIDE, MIN_WHITE, replace_pixels

HEIGHT, WIDTH = MIN_SIDE, MIN_SIDE + 7
DRAWN = random.Random(7)


def numbers(count):
    return [DRAWN.randrange(256) for _ in range(count)]


def nested(flat, *lengths):
    """``flat`` as lists of lists with these inner lengths, the innermost last."""
    for length in reversed(lengths):
        flat = [flat[start : start + length] for start in range(0, len(flat), length)]
    return flat


def decoded(image):
    assert image.media_type == "image/png"
    opened = PIL.Image.open(io.BytesIO(image.data))
    return opened.mode, opened.size, list(opened.tobytes())


@pytest.mark.parametrize(
    ("channels", "mode"), [([], "L"), ([1], "L"), ([3], "RGB"), ([4], "RGBA")], ids=["H×W", "H×W×1", "H×W×3", "H×W×4"]
)
def test_every_pixel_arrives(channels, mode):
    flat = numbers(HEIGHT * WIDTH * (channels or [1])[0])
    rows = nested(flat, WIDTH, *channels)
    for value in ({"view": rows}, {"view": flat, "view_shape": [HEIGHT, WIDTH, *channels]}):
        images: list[Image] = []
        assert replace_pixels(value, images) == value | {"view": "[image 1]"}
        assert list(map(decoded, images)) == [(mode, (WIDTH, HEIGHT), flat)]


def test_images_are_numbered_in_their_order():
    frames = [nested(numbers(HEIGHT * WIDTH), WIDTH) for _ in range(3)]
    text, images = read_content({"last": frames[:2], "now": {"screen": frames[2]}, "lives": 3})
    assert text == '{"last": ["[image 1]", "[image 2]"], "now": {"screen": "[image 3]"}, "lives": 3}'
    assert [nested(decoded(image)[2], WIDTH) for image in images] == frames


FRAME = nested(numbers(HEIGHT * WIDTH * 3), WIDTH, 3)
OTHERS = {
    "a board": nested([255] * (MIN_SIDE - 1) ** 2, MIN_SIDE - 1),
    "a map of few kinds of cells": nested([MIN_WHITE - 1] * HEIGHT * WIDTH, WIDTH),
    "two channels": nested(numbers(HEIGHT * WIDTH * 2), WIDTH, 2),
    "a number above a byte": [*FRAME[:-1], [[256, 0, 0]] * WIDTH],
    "a negative number": [*FRAME[:-1], [[-1, 0, 0]] * WIDTH],
    "fractions": [*FRAME[:-1], [[0.5, 0, 0]] * WIDTH],
    "null": [*FRAME[:-1], None],
    "text": [*FRAME[:-1], [["a", "b", "c"]] * WIDTH],
    "objects": [*FRAME[:-1], [{"r": 1, "g": 2, "b": 3}] * WIDTH],
    "a short row": [*FRAME[:-1], FRAME[-1][:-1]],
    "a row too short, another too long": [*FRAME[:-2], FRAME[-2][:-1], [*FRAME[-1], [1, 2, 3]]],
    "a short pixel": [*FRAME[:-1], [[1, 2]] * WIDTH],
    "flat, of another size": {"view": numbers(HEIGHT * WIDTH - 1), "view_shape": [HEIGHT, WIDTH]},
    "flat, of a shape that is text": {"view": numbers(HEIGHT * WIDTH), "view_shape": ["64", "71"]},
    "flat, of no size": {"view": numbers(HEIGHT * WIDTH), "view_shape": []},
    "memory of a console": {"screen": numbers(128), "screen_shape": [128]},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_image_stays_as_it_is(name):
    images: list[Image] = []
    assert replace_pixels(OTHERS[name], images) == OTHERS[name] and images == []


def test_deep_nesting_is_left_alone():
    deep: list = []
    for _ in range(900):
        deep = [deep]
    assert replace_pixels(deep, []) is not None
    hidden = FRAME
    for _ in range(MAX_DEPTH):
        hidden = [hidden]
    images: list[Image] = []
    replace_pixels(hidden, images)
    replace_pixels(hidden[0], images)
    assert len(images) == 1
