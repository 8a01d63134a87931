"""A served model that sees: vLLM on the CPU, over the wire, against transformers."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")
if not (Path(sys.prefix) / "torchvision").is_dir():
    pytest.importorskip("torchvision")

from tiny_vision_model import SIDE, noise, reference_logprobs, with_images, write_tiny_vision_model

from megatron_fleet.agents.token_engine import SamplingParams
from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import digest, read_vision
from megatron_fleet.rollout.engine_client import connect

pytestmark = pytest.mark.slow

TOKEN = "secret"
START_TIMEOUT_S = 600
KINDS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A process that serves a tiny Qwen3-VL."""
    folder = tmp_path_factory.mktemp("vision")
    model = write_tiny_vision_model(folder / "model", seed=1)
    program = [sys.executable, str(Path(__file__).with_name("serve_vision.py")), str(model), str(folder), TOKEN]
    process = subprocess.Popen(program, stdin=subprocess.PIPE)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (folder / "endpoint").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    yield SimpleNamespace(
        endpoint=(folder / "endpoint").read_text(), model=model, vision=read_vision(model), process=process
    )
    process.stdin.close()
    process.wait(START_TIMEOUT_S)


@pytest.fixture
def ask(served):
    """Sample ``tokens`` of a prompt of ids and images."""
    engine = connect([served.endpoint], TOKEN, START_TIMEOUT_S)

    async def generate(ids, placed, tokens=8, seed=1):
        assert served.process.poll() is None
        return await engine.generate(ids, SamplingParams(1.0, tokens, (), seed), "s", placed)

    return generate


def text(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 250, length).tolist()


async def test_what_vllm_samples_is_what_transformers_says_turn_by_turn(served, ask):
    first, second = noise(3 * SIDE, 2 * SIDE, 1), noise(2 * SIDE, 5 * SIDE, 2, "BMP")
    parts = [text(40, 1), first, text(7, 2)]
    shown = [first]
    for turn, more in enumerate(([second, text(33, 3)], [first, text(5, 4)], [text(9, 5)])):
        ids, placed = with_images(parts, served.vision)
        got = await ask(ids, placed, 10, turn)
        whole = [*ids, *got.token_ids.tolist()]
        expected = reference_logprobs(served.model, whole, shown, served.vision.placeholder_id)[len(ids) - 1 :]
        np.testing.assert_allclose(got.logprobs, expected, atol=2e-4)
        parts += [got.token_ids.tolist(), *more]
        shown += [part for part in more if isinstance(part, Image)]


async def test_another_image_in_the_same_place_is_another_prompt(served, ask):
    """Equal ids; only the images differ. A prefix cache that knew ids alone would answer for the first."""
    images = [noise(4 * SIDE, 4 * SIDE, seed) for seed in (3, 4)]
    scores = []
    for shown in images:
        ids, placed = with_images([text(70, 6), shown, text(70, 7)], served.vision)
        got = await ask(ids, placed)
        whole = [*ids, *got.token_ids.tolist()]
        for candidate in images:
            expected = reference_logprobs(served.model, whole, [candidate], served.vision.placeholder_id)
            scores.append(np.abs(expected[len(ids) - 1 :] - got.logprobs).max())
    assert scores[0] < 2e-4 and scores[3] < 2e-4
    assert scores[1] > 0.01 and scores[2] > 0.01


async def test_images_of_any_size_and_kind_have_the_places_that_vllm_needs(served, ask):
    """The engine compares vLLM's count with the span, and refuses what differs."""
    chance = np.random.default_rng(0)
    sizes = [(1, 1), (3, 500), (1900, 10), (640, 640), (1280, 720)]
    sizes += [tuple(np.exp(chance.uniform(np.log(8), np.log(900), 2)).astype(int).tolist()) for _ in range(15)]
    prompts = []
    for number, (width, height) in enumerate(sizes):
        shown = noise(width, height, number, KINDS[number % len(KINDS)])
        prompts.append(with_images([text(3, number), shown, text(3, number)], served.vision))
    results = await asyncio.gather(*(ask(ids, placed, 1) for ids, placed in prompts))
    assert [len(result.token_ids) for result in results] == [1] * len(sizes)


async def test_one_image_many_times_in_a_prompt(served, ask):
    shown = noise(2 * SIDE, 2 * SIDE, 8)
    ids, placed = with_images([text(3, 1), shown, [5], shown, text(3, 2), shown, text(3, 3)], served.vision)
    got = await ask(ids, placed, 4)
    expected = reference_logprobs(
        served.model, [*ids, *got.token_ids.tolist()], [shown] * 3, served.vision.placeholder_id
    )
    np.testing.assert_allclose(got.logprobs, expected[len(ids) - 1 :], atol=2e-4)


async def test_a_placeholder_that_the_policy_said_is_no_image(served, ask):
    """It changes what the model reads, and moves no image."""
    shown, pad = noise(2 * SIDE, 2 * SIDE, 9), served.vision.placeholder_id
    said, placed = with_images([[5, pad, pad, 6], shown, text(4, 1), [pad], text(2, 2)], served.vision)
    plain, _ = with_images([[5, 7, 7, 6], shown, text(4, 1), [7], text(2, 2)], served.vision)
    with_said, with_plain = await ask(said, placed, 4), await ask(plain, placed, 4)
    assert len(with_said.token_ids) == 4 and np.isfinite(with_said.logprobs).all()
    expected = reference_logprobs(served.model, [*plain, *with_plain.token_ids.tolist()], [shown], pad)
    np.testing.assert_allclose(with_plain.logprobs, expected[len(plain) - 1 :], atol=2e-4)
    assert (await ask([5, pad, 6], (), 2)).logprobs.shape == (2,)


def broken_images() -> dict[str, tuple[Image, str]]:
    whole = noise(2 * SIDE, 2 * SIDE, 10)
    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    return {
        "no image": (Image("image/png", b"not an image"), "cannot be read"),
        "cut off": (Image("image/png", whole.data[: len(whole.data) // 2]), "cannot be processed"),
        "a bomb": (
            Image("image/png", whole.data[:8] + chunk + whole.data[33:]),
            "cannot be read|beyond the supported size",
        ),
        "a strip": (noise(2000, 4, 11), "beyond the supported size"),
    }


@pytest.mark.parametrize("name", broken_images())
async def test_a_broken_image_refuses_its_request_and_no_other(served, ask, name):
    ids, placed = with_images([text(3, 1), noise(2 * SIDE, 2 * SIDE, 12), text(3, 2)], served.vision)
    bad, reason = broken_images()[name]
    swapped = dataclasses.replace(placed[0], image=bad, digest=digest(bad))
    for _ in range(2):  # the second time the engine may hold parts of it
        with pytest.raises(ValueError, match=reason):
            await ask(ids, [swapped])
    assert len((await ask(ids, placed)).token_ids) == 8


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        ((0, 1), "not all placeholders"),
        ((-1, 0), "not all placeholders"),
        ((0, -1), "needs 4 placeholders, but has 3"),
        ((1, 0), "needs 4 placeholders, but has 3"),
        ((0, 50), "a prompt of 10"),
        ((6, 0), "a prompt of 10"),
        ((-9, 0), "a prompt of 10"),
    ],
)
async def test_a_image_in_the_wrong_place_is_refused(served, ask, move, reason):
    ids, (placed,) = with_images([text(3, 1), noise(2 * SIDE, 2 * SIDE, 13), text(3, 2)], served.vision)
    wrong = dataclasses.replace(placed, start=placed.start + move[0], end=placed.end + move[1])
    with pytest.raises(ValueError, match=reason):
        await ask(ids, [wrong])
    with pytest.raises(ValueError, match="a prompt of 10"):
        await ask(ids, [placed, placed])
    assert len((await ask(ids, [placed])).token_ids) == 8


async def test_a_prompt_beyond_the_context_is_refused(served, ask):
    ids, placed = with_images([noise(640, 640, seed) for seed in range(11)], served.vision)
    assert len(ids) > 4096
    with pytest.raises(ValueError, match=r"context|length"):
        await ask(ids, placed, 1)
    assert len((await ask(text(3, 1), (), 2)).token_ids) == 2
