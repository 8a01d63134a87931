"""Results of tools become text and images, whatever their shape."""

import base64
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.envs.base import EnvBusy, EnvLost, Image, Observation, Reward, ToolError, clean_json
from megatron_fleet.envs.content import error_text, known_number, read_content, score_of

PIXELS = b"\x89PNG"
DATA = base64.b64encode(PIXELS).decode()
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "data": DATA, "mimeType": "image/jpeg"}
PART = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DATA}"}}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([], "[]"),
        ({}, "{}"),
        (None, "null"),
        (7, "7"),
        (False, "false"),
        ({"data": "inner", "is_error": False}, "inner"),
        ({"data": [{"id": 1}]}, '[{"id": 1}]'),
        ({"data": 0, "content": [TEXT]}, "0"),
        ({"data": None, "structured_content": {"x": 1}, "content": [TEXT]}, '{"x": 1}'),
        ({"data": None, "structured_content": None, "content": [TEXT, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": []}, '{"content": []}'),
        ({"content": "the body of a page", "id": 3}, '{"content": "the body of a page", "id": 3}'),
        ([{"type": "invoice", "text": "a"}], '[{"type": "invoice", "text": "a"}]'),
        ({"id": "é", "error": None}, '{"id": "é", "error": null}'),
        ([{"type": "resource", "resource": {"uri": "file:a", "text": "in it"}}], "in it"),
        ([{"type": "resource", "resource": {"uri": "file:a", "blob": "AA"}}], "[data: file:a]"),
        ([{"type": "resource_link", "uri": "file:a", "name": "n"}], "[resource_link: file:a]"),
        ([{"type": "audio", "data": "AA", "mimeType": "audio/wav"}], "[audio: audio/wav]"),
        ([{"type": "image_url", "image_url": {"url": "http://h/a.png"}}], "[image at http://h/a.png]"),
        ([{"type": "image", "data": "not base64!", "mimeType": "image/png"}], "[an image that could not be read]"),
        ([{"type": "image", "data": None}], "[an image that could not be read]"),
    ],
)
def test_text(result, text):
    assert read_content(result) == (text, ())


@pytest.mark.parametrize(
    ("result", "text", "kinds"),
    [
        ([TEXT, IMAGE, TEXT, PART], "a\n[image 1]\na\n[image 2]", ["image/jpeg", "image/png"]),
        ({"content": [IMAGE], "data": {"raw": 1}, "structured_content": {"raw": 1}}, "[image 1]", ["image/jpeg"]),
        ([{"type": "image_url", "image_url": f"data:;base64,{DATA}"}], "[image 1]", ["image/png"]),
    ],
)  # fmt: skip
def test_images_are_kept_and_their_places_named(result, text, kinds):
    assert read_content(result) == (text, tuple(Image(kind, PIXELS) for kind in kinds))


def test_errors_are_told_apart():
    assert error_text({"content": [TEXT], "is_error": True}) == "a"
    assert error_text({"content": [TEXT], "isError": True}) == "a"
    assert error_text({"content": [], "is_error": True}) is not None
    for fine in ({"content": [TEXT], "is_error": False}, {"error": None}, "is_error", [True], None):
        assert error_text(fine) is None


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (0.5, 0.5), (True, 1.0), ({"score": 0}, 0.0), ({"reward": 1, "score": None}, 1.0), ('{"score": 0.25}', 0.25),
        ({"structured_content": {"reward": 0.75}}, 0.75), ({"content": [TEXT]}, None), ("fine", None),
        ({"score": "high"}, None), ({"passed": True}, None), (None, None), ([1.0], None),
    ],
)  # fmt: skip
def test_scores(result, score):
    assert score_of(result) == score


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "text", "content", "data", "x"]), inner),
)


@given(JSON)
def test_no_result_is_lost_or_breaks_it(result):
    text, images = read_content(result)
    assert images == ()
    if isinstance(result, dict) and not {"content", "data"} & result.keys():
        assert json.loads(text) == result
    error_text(result)
    score_of(result)


@pytest.mark.parametrize("value", [10**400, float("nan"), float("inf"), -1e31, "1", None, [1]])
def test_what_is_no_reward(value):
    assert known_number(value) is None and known_number(True) == 1.0
    assert score_of({"score": value}) is None and score_of("[" * 100_000) is None


@pytest.mark.parametrize("kind", [EnvLost, EnvBusy, lambda reason: Reward(None, reason).reason])
def test_a_reason_is_cut_and_can_be_written(kind):
    """Servers word it, and a frame may hold 100 MiB."""
    assert str(kind("reset \ud800")) == "reset ?"
    assert str(kind("x" * 500)) == "x" * 500
    assert str(kind("x" * 10**6)) == "x" * 499 + "…"


def test_what_json_cannot_hold_is_replaced():
    value = {"a": [1, "é", {"b": None}]}
    assert clean_json(value) is value
    assert clean_json({"\ud800": ["x\udfff", math.nan, -math.inf, "NaN"]}) == {"?": ["x?", None, None, "NaN"]}
    assert Observation("\ud800", ({"name": "\ud800"},), ToolError("timeout", "\ud800")) == Observation(
        "?", ({"name": "?"},), ToolError("timeout", "?")
    )
