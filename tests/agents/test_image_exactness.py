"""Random episodes with images: the trajectory's ids and spans are what the engine was given, turn by turn."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from agent_doubles import SETTINGS, TASK, TOOLS, ScriptedEnvironment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_doubles import make_image, vision_folder
from test_exactness import HonestEngine, Said, agents, requests_of, turns

from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.envs.base import Image, Observation
from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.renderer import ChatRenderer
from megatron_fleet.models.images import digest
from megatron_fleet.models.qwen3.chat import Qwen

BROKEN = Image("image/png", b"no image")
SPEAKERS = {True: Qwen(True, True), False: Qwen(True, False)}


@dataclasses.dataclass
class SeeingEngine(HonestEngine):
    """Also remembers the images of every request."""

    seen: list[list] = dataclasses.field(default_factory=list)

    async def generate(self, prompt_ids, params, session, images=()):
        generation = await super().generate(prompt_ids, params, session)
        self.seen.append(list(images))
        return generation


@pytest.fixture(scope="module")
def renderers(tmp_path_factory) -> dict[bool, ChatRenderer]:
    folder = vision_folder(tmp_path_factory.mktemp("vision"))
    return {thinking: make_renderer(folder, thinking) for thinking in SPEAKERS}


image_lists = st.lists(
    st.one_of(
        st.builds(make_image, st.integers(1, 300), st.integers(2, 200), st.sampled_from(["red", "blue"])),
        st.just(BROKEN),
    ),
    max_size=3,
)


@st.composite
def observations(draw) -> Observation:
    """Text with the places of its images, some of them missing; long texts lose their end."""
    images = draw(image_lists)
    words = st.sampled_from(["a page\n", "", "<|image_pad|>", "[image 9]", "row é " * 40])
    places = [f"{draw(words)}[image {n}]" for n in range(1, draw(st.integers(0, len(images))) + 1)]
    return Observation("".join(places) + draw(words), images=tuple(images))


@pytest.mark.parametrize("thinking", [True, False])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=st.lists(turns, max_size=6),
    first=observations(),
    results=st.lists(observations(), min_size=18, max_size=18),
    agent=agents,
    room=st.sampled_from([1500, 2500, 6000]),
)
def test_images_stand_where_the_engine_was_told(renderers, thinking, script, first, results, agent, room):
    renderer = renderers[thinking]
    engine = SeeingEngine(renderer, SPEAKERS[thinking], list(script))
    opening = dataclasses.replace(first, content=first.content + TASK.prompt, tools=TOOLS)
    env = ScriptedEnvironment(reset_script=[opening], step_script=list(results))
    limits = dataclasses.replace(SETTINGS, agent=agent, max_context=room, max_tokens_per_turn=120)
    trajectory = asyncio.run(run_episode(TASK, env, engine, renderer, limits, None, "s"))
    trajectory.check()
    assert requests_of(trajectory) == [
        (prompt, g.token_ids.tolist(), g.logprobs.tolist())
        for prompt, g in zip(engine.prompts, engine.generations, strict=True)
        if len(g.token_ids)
    ]
    assert all(len(p) + q.max_tokens <= room for p, q in zip(engine.prompts, engine.params, strict=True))
    for prompt, images in zip(engine.prompts, engine.seen, strict=True):
        assert_runs_are(renderer, prompt, images)
    assert_spans_are_what_the_engine_saw(trajectory, engine)
    kept = [image for o in (first, *results) for image in o.images if image is not BROKEN]
    assert {d: i.data for d, i in trajectory.images.items()}.items() <= {digest(i): i.data for i in kept}.items()


def assert_runs_are(renderer: ChatRenderer, prompt: list[int], images: list) -> None:
    """Every run of placeholders is one image, between its marks, as long as its size says; there is no other."""
    pad, tokens = renderer.vision.placeholder_id, renderer.tokenizer.special
    runs, place = [], 0
    while place < len(prompt):
        end = place
        while end < len(prompt) and prompt[end] == pad:
            end += 1
        if end > place:
            runs.append((place, end))
            assert (prompt[place - 1], prompt[end]) == (tokens["<|vision_start|>"], tokens["<|vision_end|>"])
        place = max(end, place + 1)
    assert [(i.start, i.end) for i in images] == runs
    assert all(i.digest == digest(i.image) for i in images)


def assert_spans_are_what_the_engine_saw(trajectory: Trajectory, engine: SeeingEngine) -> None:
    """In each segment the images of its last request, and of what was shown after it."""
    told = {}
    said = {span.turn: span.start for span in reversed(trajectory.spans) if span.kind == "action"}
    assert list(range(len(engine.seen))) == sorted(said)
    for turn, images in enumerate(engine.seen):
        where = max(start for start in trajectory.segment_starts if start <= said[turn])
        told |= {(where + i.start, where + i.end): i.digest for i in images}
    spans = {(s.start, s.end): s.digest for s in trajectory.image_spans}
    assert told.items() <= spans.items()
    last = max((s.end for s in trajectory.spans if s.kind == "action"), default=0)
    assert all(start >= last for start, _ in spans.keys() - told.keys())
    shown = sum(end - start for start, end in spans)
    assert trajectory.metrics.get("image_tokens", 0) == shown


def test_a_policy_that_writes_a_placeholder_ends_its_episode(renderers):
    renderer = renderers[False]
    pad = renderer.vision.placeholder_id

    class Writer(SeeingEngine):
        async def generate(self, prompt_ids, params, session, images=()):
            assert set(renderer.vision.unspoken_ids) < set(params.stop_token_ids)
            generation = await super().generate(prompt_ids, params, session, images)
            ids = generation.token_ids.copy()
            ids[-1] = pad
            return dataclasses.replace(generation, token_ids=ids)

    engine = Writer(renderer, SPEAKERS[False], [Said(Spoken(content="look "))] * 3)
    opening = Observation("Look at [image 1].", TOOLS, images=(make_image(60, 60),))
    env = ScriptedEnvironment(reset_script=[opening])
    trajectory = asyncio.run(run_episode(TASK, env, engine, renderer, SETTINGS, None, "s"))
    trajectory.check()
    assert trajectory.outcome is Outcome.WROTE_IMAGE and trajectory.reward == 1.0
    assert len(engine.seen) == 1 and len(trajectory.image_spans) == 1
    assert trajectory.token_ids[-1] == pad and trajectory.action_mask[-1]
