"""Images on the wire: each file travels once per connection, and an engine that forgot one says so."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from megatron_fleet.agents.token_engine import Generation, SamplingParams
from megatron_fleet.envs.base import Image
from megatron_fleet.models.images import PlacedImage, digest
from megatron_fleet.rollout.engine_client import connect
from megatron_fleet.rollout.engine_server import EngineServer, ImageStore

TOKEN = "secret"
PARAMS = SamplingParams(1.0, 4, (3,), seed=1)


def make_image(content: bytes, start: int = 0) -> PlacedImage:
    image = Image("image/png", content)
    return PlacedImage(start, start + 2, image, digest(image))


class Recording(ImageStore):
    """Knows what came over the wire."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        super().__init__(max_bytes)
        self.came: list[bytes] = []

    def put(self, image: Image) -> None:
        self.came.append(image.data)
        super().put(image)


@contextlib.asynccontextmanager
async def serving(store: Recording):
    seen = []

    async def generate(prompt, params, session, images) -> Generation:
        seen.append(images)
        return Generation(np.array([4], np.int32), np.zeros(1, np.float32), "stop", ((0, 0, 1),))

    server = EngineServer(generate, TOKEN)
    server._images = store
    endpoint = await server.listen("127.0.0.1")
    server.open()
    yield endpoint, seen
    server.close()


async def test_a_file_travels_once_and_every_request_has_it():
    store, a, b = Recording(), make_image(b"a" * 100), make_image(b"b" * 3_000_000, 2)
    store._max_bytes = 1 << 30
    async with serving(store) as (endpoint, seen):
        engine = connect([endpoint], TOKEN, HANG_S)
        for images in ([a], [a, b], [a, b], ()):
            await engine.generate([9] * 8, PARAMS, "s", images)
    assert store.came == [a.image.data, b.image.data]
    assert seen == [[a], [a, b], [a, b], []]


async def test_concurrent_requests_send_a_shared_image_once():
    store, shared = Recording(), make_image(b"s" * 1000)
    async with serving(store) as (endpoint, seen):
        engine = connect([endpoint], TOKEN, HANG_S)
        await asyncio.gather(*(engine.generate([9], PARAMS, str(i), [shared]) for i in range(20)))
    assert store.came == [shared.image.data] and seen == [[shared]] * 20


async def test_what_the_engine_forgot_is_sent_again():
    store = Recording(max_bytes=250)
    first, second, third = (make_image(bytes([i]) * 100) for i in range(3))
    async with serving(store) as (endpoint, seen):
        engine = connect([endpoint], TOKEN, HANG_S)
        for images in ([first], [first, second], [third], [first, second]):
            await engine.generate([9], PARAMS, "s", images)
    assert seen == [[first], [first, second], [third], [first, second]]
    assert store.came == [p.image.data for p in (first, second, third, first, second)]


async def test_more_images_than_an_engine_keeps_are_refused_and_others_are_not():
    store = Recording(max_bytes=150)
    async with serving(store) as (endpoint, seen):
        engine = connect([endpoint], TOKEN, HANG_S)
        with pytest.raises(ValueError, match="more than an engine keeps at once"):
            await engine.generate([9], PARAMS, "s", [make_image(b"a" * 100), make_image(b"b" * 100, 2)])
        await engine.generate([9], PARAMS, "s", [make_image(b"a" * 100)])
    assert seen == [[make_image(b"a" * 100)]]


async def test_an_engine_that_came_back_is_sent_everything_again():
    placed, fresh = make_image(b"a" * 100), Recording()
    async with serving(Recording()) as (before, _):
        engine = connect([before], TOKEN, HANG_S)
        await engine.generate([9], PARAMS, "s", [placed])
        (replica,) = engine._replicas
        replica._writer.transport.abort()
        await asyncio.gather(*replica._tasks, return_exceptions=True)
    async with serving(fresh) as (now, seen):
        engine.moved(before, now)
        await engine.generate([9], PARAMS, "s", [placed])
    assert fresh.came == [placed.image.data] and seen == [[placed]]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=10, max_size=60), st.integers(4, 12))
def test_the_store_keeps_what_was_used_last(operations, max_bytes):
    """Against a plain list, the newest last."""
    store, kept = ImageStore(max_bytes), []
    for is_put, size in operations:
        placed = make_image(b"x" * size)
        if is_put:
            store.put(placed.image)
            if placed not in kept:
                kept.append(placed)
            while sum(len(p.image.data) for p in kept) > max_bytes:
                kept.pop(0)
        else:
            found = store.placed([(0, 2, placed.digest)])
            assert found == ([placed] if placed in kept else None)
            if found:
                kept.append(kept.pop(kept.index(placed)))
