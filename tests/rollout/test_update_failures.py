"""Updates that fail in a running rollout: nothing is answered with half a version, and the next attempt is whole."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from shm_weights import folder_publisher
from tiny_model import greedy_continuation, write_tiny_model

from megatron_fleet.agents.engine import EngineLost, SamplingParams
from megatron_fleet.rollout.service import RolloutService
from megatron_fleet.weight_sync.shared_buffer import Board

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + j * j) % 400 + 20 for j in range(5 + 3 * i)] for i in range(4)]
TOKENS = 24


class Rollout:
    def __init__(self, service, models):
        self.service, self.models = service, models
        self.client = service.weight_client()
        self.source, self.publisher = folder_publisher(models["a"], self.client)
        self.version = 0

    def publish(self, name: str) -> None:
        self.source.folder = self.models[name]
        self.version += 1
        self.publisher.publish(self.version)

    def generate(self, tokens=TOKENS):
        params = SamplingParams(0.0, tokens, (), 1)

        async def run():
            engine = self.service.engine()
            calls = (engine.generate(prompt, params, str(i)) for i, prompt in enumerate(PROMPTS))
            return await asyncio.gather(*calls, return_exceptions=True)

        return asyncio.run(run())

    def check_serves(self, name: str) -> None:
        results = self.generate()
        assert [r.token_ids.tolist() for r in results] == greedy_continuation(self.models[name], PROMPTS, TOKENS)
        assert {r.versions for r in results} == {((self.version, 0, TOKENS),)}


class Background:
    """Requests sent while something else goes on."""

    def __init__(self, rollout, tokens=TOKENS):
        self.results = []
        self._thread = threading.Thread(target=lambda: self.results.extend(rollout.generate(tokens)))
        self._thread.start()
        time.sleep(0.3)

    def wait(self):
        self._thread.join(120)
        assert self.results
        return self.results


@pytest.fixture(scope="module")
def rollout(tmp_path_factory, episode_python):
    folder = tmp_path_factory.mktemp("rollout")
    models = {name: write_tiny_model(folder / name, seed) for name, seed in (("a", 1), ("b", 2))}
    with RolloutService(rollout_config(models["a"]), folder, episode_python) as service:
        made = Rollout(service, models)
        yield made
        made.publisher.close()


def test_requests_in_flight_go_on_under_the_new_weights(rollout):
    rollout.publish("a")
    background = Background(rollout, tokens=400)
    rollout.publish("b")
    for prompt, result in zip(PROMPTS, background.wait(), strict=True):
        (first, start, cut), (second, again, end) = result.versions
        assert (first, second, start, again, end) == (rollout.version - 1, rollout.version, 0, cut, 400)
        assert 0 < cut < 400
        said = result.token_ids.tolist()
        assert said[: min(cut, 16)] == greedy_continuation(rollout.models["a"], [prompt], min(cut, 16))[0]
        after = min(16, end - cut)
        assert said[cut : cut + after] == greedy_continuation(rollout.models["b"], [prompt + said[:cut]], after)[0]


def test_a_torn_update_is_repeated_on_a_fresh_engine(rollout):
    restarts, layout, memory = rollout.service.stats().restarts, rollout.publisher._layout, rollout.publisher._memory
    torn = layout.spans[-1][0] + 3

    class Tearing:
        """Changes a byte after its checksum was taken and before the engine looks; the next engine finds it mended."""

        def __getattr__(self, verb):
            return getattr(rollout.client, verb)

        def update_weights(self, info):
            Board(memory, len(layout.buckets), layout.writers).wait_complete(info["round"])
            memory[torn] ^= 1
            rollout.client.update_weights(info)
            memory[torn] ^= 1

    rollout.publisher._client = Tearing()
    rollout.publish("a")
    rollout.publisher._client = rollout.client
    rollout.check_serves("a")
    assert rollout.service.stats().restarts == restarts + 1


def test_an_engine_killed_in_an_update_comes_back_with_it(rollout):
    restarts, core = rollout.service.stats().restarts, rollout.service.engine_processes()[-1]
    background = []

    def kill():
        rollout.source.before_write = None
        time.sleep(0.5)  # the engine waits for the first bucket, without any weights
        background.append(Background(rollout))
        os.kill(core, signal.SIGKILL)

    rollout.source.before_write = kill
    rollout.publish("b")
    expected = greedy_continuation(rollout.models["b"], PROMPTS, TOKENS)
    for result, tokens in zip(background[0].wait(), expected, strict=True):
        assert isinstance(result, EngineLost) or (
            result.versions == ((rollout.version, 0, TOKENS),) and result.token_ids.tolist() == tokens
        )
    rollout.check_serves("b")
    assert rollout.service.stats().restarts == restarts + 1


def test_a_trainer_that_gives_an_update_up_leaves_nobody_serving_until_the_next_one(rollout):
    background = []

    def fail():
        rollout.source.before_write = None
        time.sleep(0.5)
        background.append(Background(rollout))
        raise OSError("the trainer failed")

    rollout.source.before_write = fail
    with pytest.raises(OSError, match="the trainer failed"):
        rollout.publish("a")
    late = Background(rollout)
    time.sleep(3)
    assert late.results == [] or all(isinstance(r, EngineLost) for r in late.results)
    rollout.version -= 1
    rollout.publish("a")
    for result in background[0].wait() + late.wait():
        assert isinstance(result, EngineLost) or result.versions == ((rollout.version, 0, TOKENS),)
    rollout.check_serves("a")
