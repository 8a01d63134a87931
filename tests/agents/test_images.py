"""Images as tokens: their places, their files, and models that see none."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json

import numpy as np
import PIL.Image
import pytest
from agent_doubles import CALL, SETTINGS, TASK, TOOLS, ScriptedEngine, ScriptedEnvironment, Turn, use
from hypothesis import given
from hypothesis import strategies as st
from image_doubles import PROCESSOR, make_image, vision_folder

from megatron_fleet.agents.images import UNREADABLE, around, view_images
from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AgentConfig
from megatron_fleet.envs.base import Image, Observation
from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.models.chat.tokenizer import train_tokenizer
from megatron_fleet.models.images import MAX_PIXELS, ImageSpan, digest, place, read_vision, readable, size_of
from megatron_fleet.models.qwen3.chat import QWEN3_TOKENS


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return make_renderer(vision_folder(tmp_path_factory.mktemp("vision")), False)


def play(renderer, script, reset, steps=(), **changes):
    engine = ScriptedEngine(renderer.tokenizer, list(script))
    env = ScriptedEnvironment(reset_script=[reset], step_script=list(steps))
    limits = dataclasses.replace(SETTINGS, **changes)
    return engine, asyncio.run(run_episode(TASK, env, engine, renderer, limits, None, "s"))


def test_placeholders_are_counted_by_the_processors_files(tmp_path):
    vision = read_vision(vision_folder(tmp_path))
    assert vision.tokens(280, 112) == 10 * 4
    assert vision.tokens(1, 1) == 1
    assert vision.tokens(10_000, 10_000) == 36  # 40 squares are the most; 6 × 6 keep the proportions
    newer = {"image_processor": PROCESSOR | {"size": {"shortest_edge": 784, "longest_edge": 784 * 4}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    assert read_vision(tmp_path).tokens(280, 280) == 4


def test_a_folder_that_does_not_say_how_images_become_tokens_is_refused(tmp_path):
    folder = vision_folder(tmp_path)
    (folder / "preprocessor_config.json").write_text('{"patch_size": 14}')
    with pytest.raises(UserError, match=r"preprocessor_config.json do not say how .*merge_size"):
        read_vision(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"preprocessor_config.json is missing"):
        make_renderer(folder, False)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_vision(folder) is None and make_renderer(folder, False).vision is None


def test_another_placeholder_than_the_tokenizers_is_refused(tmp_path):
    config = json.loads((vision_folder(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_token_id": 7}))
    with pytest.raises(UserError, match=r"image_token_id=7 in config.json is not the tokenizer's"):
        make_renderer(tmp_path, False)


def test_files_that_are_no_whole_image_are_not_shown():
    good = make_image(640, 480)
    noise = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    out = io.BytesIO()
    noise.save(out, "JPEG")
    cut = Image("image/jpeg", out.getvalue()[:-300])
    assert size_of(good) == (640, 480) and size_of(cut) == (64, 64)
    assert readable(good) and not readable(cut) and not readable(Image("image/png", b""))
    assert not readable(make_image(300, 1)) and readable(make_image(200, 1))
    out = io.BytesIO()
    PIL.Image.new("1", (MAX_PIXELS // 1000 + 1, 1000)).save(out, "PNG")
    assert len(out.getvalue()) < 100_000 and not readable(Image("image/png", out.getvalue()))
    out = io.BytesIO()
    noise.save(out, "PPM")
    assert not readable(Image("image/png", out.getvalue()))


def test_a_broken_image_leaves_a_sentence_and_the_others_their_places(renderer):
    images = (make_image(30, 30), Image("image/png", b"?"), make_image(40, 40))
    seen = asyncio.run(view_images("a [image 1] b [image 2] c [image 3] d", images, renderer.vision, "none"))
    assert seen.text == f"a [image 1] b {UNREADABLE} c [image 2] d"
    assert seen.images == (images[0], images[2]) and seen.unseen == 1


@given(st.lists(st.text(st.characters(exclude_characters="[")), min_size=1, max_size=4), st.integers(0, 3))
def test_texts_are_cut_at_the_places_of_images(parts, missing):
    text = parts[0] + "".join(f"[image {n}]{part}" for n, part in enumerate(parts[1:], 1))
    assert around(text, len(parts) - 1 + missing) == [*parts, *[""] * missing]


def test_a_model_without_vision_reads_that_there_was_a_image(tmp_path):
    train_tokenizer(["a"] * 3, 300, tmp_path, QWEN3_TOKENS)
    shown = Observation("[image 1] and [image 2]", images=(make_image(300, 300), make_image(9, 9)))
    reset = Observation("Look: [image 1]", TOOLS, images=(make_image(50, 50),))
    engine, t = play(make_renderer(tmp_path, False), [Turn(CALL), Turn("4 <done>")], reset, [shown])
    t.check()
    assert t.metrics["images_unseen"] == 3 and "images" not in t.metrics
    assert not t.images and not t.image_spans
    blind = SETTINGS.prompts.unseen
    assert [m["content"] for m in t.messages if m["role"] == "tool"] == [f"{blind} and {blind}"]
    assert engine.tokenizer.decode(engine.prompts[-1]).count(blind) == 3


def test_an_episode_to_be_trained_on_has_no_image_that_the_trainer_cannot_see(renderer):
    reset = Observation("Look: [image 1]", TOOLS, images=(make_image(50, 50),))
    _, t = play(renderer, [Turn("4 <done>")], reset, images=False)
    assert t.metrics["images_unseen"] == 1 and not t.image_spans
    assert renderer.vision.placeholder_id not in t.token_ids


def test_images_count_as_the_context_that_they_take(renderer):
    screen = Observation("[image 1]", images=(make_image(280, 112),))
    reset = Observation("Look", TOOLS)
    engine, t = play(renderer, [Turn(CALL), Turn("4 <done>")], reset, [screen])
    assert (
        t.outcome is Outcome.COMPLETED
        and t.metrics["image_tokens"] == 40 == t.image_spans[0].end - t.image_spans[0].start
    )
    needed = len(engine.prompts[-1]) + 16
    for room, outcome in ((needed, Outcome.COMPLETED), (needed - 1, Outcome.CONTEXT_OVERFLOW)):
        changes = {"max_context": room, "max_tokens_per_turn": 100}
        _, again = play(renderer, [Turn(CALL), Turn("4 <done>")], reset, [screen], **changes)
        assert again.outcome is outcome, room
    assert not again.image_spans and again.metrics["images"] == 1 and len(again.images) == 1


def test_removed_turns_take_their_images_along(renderer):
    screens = [make_image(30 * n, 30 * n) for n in (1, 2, 3)]
    reset = Observation("Look [image 1]", TOOLS, images=(screens[0],))
    steps = [Observation("[image 1]", images=(screen,)) for screen in screens[1:]]
    script = [Turn(CALL), Turn(CALL), use("manage_context", '{"keep_recent_turns": 1}'), Turn("4 <done>")]
    engine, t = play(renderer, script, reset, steps, agent=AgentConfig(context_tools=True), max_context=6000)
    t.check()
    first, second = t.segments()
    names = [[s.digest for s in t.image_spans if part.start <= s.start < part.stop] for part in (first, second)]
    assert names == [[digest(s) for s in screens], [digest(s) for s in (screens[0], screens[2])]]
    assert t.token_ids[second][: len(engine.prompts[-1])].tolist() == engine.prompts[-1]


def test_a_image_shown_twice_is_kept_once(renderer):
    screen = Observation("[image 1]", images=(make_image(60, 60),))
    _, t = play(renderer, [Turn(CALL), Turn(CALL), Turn("4 <done>")], Observation("Look", TOOLS), [screen, screen])
    name = digest(make_image(60, 60))
    assert [s.digest for s in t.image_spans] == [name, name] and list(t.images) == [name]
    assert [m["images"] for m in t.messages if "images" in m] == [[name], [name]]


def test_a_result_that_is_cut_keeps_its_image(renderer):
    long = Observation("word " * 3000 + "[image 1]", images=(make_image(60, 60),))
    _, t = play(renderer, [Turn(CALL), Turn("4 <done>")], Observation("Look", TOOLS), [long], max_context=60_000)
    assert t.metrics["truncated_outputs"] == 1 and len(t.image_spans) == 1


def test_a_run_that_is_not_its_images_is_noticed(renderer):
    pad, one = renderer.vision.placeholder_id, make_image(280, 112)
    whole = [1, *[pad] * 40, 2]
    assert [(p.start, p.end) for p in place(whole, [one], renderer.vision, 5)] == [(6, 46)]
    for ids, images in (
        (whole[:-2], [one]),
        ([*whole[:20], pad, *whole[20:]], [one]),
        ([*whole, pad], [one]),
        (whole, [one, one]),
    ):
        with pytest.raises(ValueError):
            place(ids, images, renderer.vision)
    with pytest.raises(ValueError, match="without vision"):
        place(whole, [one], None)


def test_broken_image_spans_fail_the_check(renderer):
    screen = Observation("[image 1] [image 2]", images=(make_image(60, 60), make_image(90, 60)))
    _, t = play(renderer, [Turn(CALL), Turn("4 <done>")], Observation("Look", TOOLS), [screen])
    t.check()
    first, second = t.image_spans
    said = int(np.flatnonzero(t.action_mask)[0])
    for spans, images in (
        ((second, first), t.images),
        ((dataclasses.replace(first, end=first.end + 1), second), t.images),
        ((ImageSpan(said, said + 1, first.digest),), t.images),
        ((ImageSpan(0, 1, first.digest), second), t.images),
        ((dataclasses.replace(second, end=len(t.token_ids) + 1),), t.images),
        (t.image_spans, {first.digest: t.images[first.digest]}),
    ):
        broken = dataclasses.replace(t, image_spans=spans, images=images)
        with pytest.raises(ValueError, match="image"):
            broken.check()
