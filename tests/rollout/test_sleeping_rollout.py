"""Real engines through the cycle of a shared device. On CPU vLLM pauses and keeps its memory; all else is real."""

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

from megatron_fleet.agents.engine import SamplingParams
from megatron_fleet.rollout.service import RolloutService

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + j * j) % 400 + 20 for j in range(5 + 3 * i)] for i in range(4)]
TOKENS = 16


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_tiny_model(folder / name, seed) for name, seed in (("a", 1), ("b", 2))}


@pytest.fixture(scope="module")
def service(tmp_path_factory, models, episode_python):
    engine = {"kv_cache_bytes": 256 << 20, "colocated": True, "start_timeout_s": 900}
    out = tmp_path_factory.mktemp("rollout")
    with RolloutService(rollout_config(models["a"], engine=engine), out, episode_python) as made:
        made.log = out / "logs" / "rollout.log"
        yield made


@pytest.fixture(scope="module")
def publish(service, models):
    source, publisher = folder_publisher(models["a"], service.weight_client())

    def to(name, version):
        source.folder = models[name]
        publisher.publish(version)

    yield to
    publisher.close()


def generate(service):
    async def run():
        engine = service.engine()
        calls = (
            engine.generate(prompt, SamplingParams(0.0, TOKENS, (), 1), str(i)) for i, prompt in enumerate(PROMPTS)
        )
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def test_requests_wait_until_the_engine_is_wholly_awake(service, models, publish):
    assert "frees no memory on platform 'cpu'" in service.sleep()
    results = []
    asking = threading.Thread(target=lambda: results.extend(generate(service)))
    asking.start()
    service.wake("weights")
    publish("b", 1)
    time.sleep(1)
    assert not results
    service.wake("kv_cache")
    asking.join(60)
    assert [r.token_ids.tolist() for r in results] == greedy_continuation(models["b"], PROMPTS, TOKENS)
    assert {r.versions for r in results} == {((1, 0, TOKENS),)}


def test_an_engine_killed_in_its_sleep_comes_back_with_the_new_weights(service, models, publish):
    core = service.engine_processes()[-1]
    service.sleep()
    os.kill(core, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while "is lost" not in service.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(3)
    service.wake("weights")
    publish("a", 2)
    assert "is back" not in service.log.read_text()
    service.wake("kv_cache")
    assert "is back" in service.log.read_text()
    results = generate(service)
    assert [r.token_ids.tolist() for r in results] == greedy_continuation(models["a"], PROMPTS, TOKENS)
    assert {r.versions for r in results} == {((2, 0, TOKENS),)}
    service.sleep()
    service.wake("weights")
    publish("b", 3)
    service.wake("kv_cache")
    assert {r.versions for r in generate(service)} == {((3, 0, TOKENS),)}
