"""Real engines through the cycle of a shared device. On CPU vLLM pauses and keeps its memory; all else is real."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from rollout_runs import TIMEOUT_S, running
from tiny_model import greedy_continuation, write_tiny_model
from waiting import wait_until

from megatron_fleet.agents.engine import EngineLost, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + j * j) % 400 + 20 for j in range(5 + 3 * i)] for i in range(4)]
TOKENS = 16
PARAMS = [SamplingParams(0.0, TOKENS, (), 1)] * len(PROMPTS)


@pytest.fixture(scope="module")
def rollout(tmp_path_factory, episode_python):
    folder = tmp_path_factory.mktemp("rollout")
    models = {name: write_tiny_model(folder / name, seed) for name, seed in (("a", 1), ("b", 2))}
    engine = {"kv_cache_bytes": 256 << 20, "colocated": True, "start_timeout_s": 900}
    with running(rollout_config(models["a"], engine=engine), folder, episode_python, models) as started:
        yield started


def check_serves(rollout, name, results):
    assert [r.token_ids.tolist() for r in results] == greedy_continuation(rollout.models[name], PROMPTS, TOKENS)
    assert {r.versions for r in results} == {((rollout.version, 0, TOKENS),)}


def test_requests_wait_until_the_engine_is_wholly_awake(rollout):
    assert "frees no memory on platform 'cpu'" in rollout.run(rollout.service.sleep())
    asking = rollout.begin(rollout.answers(PROMPTS, PARAMS))
    rollout.run(rollout.service.wake("weights"))
    rollout.sync("b")
    time.sleep(1)
    assert not asking.done()
    rollout.run(rollout.service.wake("kv_cache"))
    check_serves(rollout, "b", asking.result(TIMEOUT_S))


def test_an_engine_killed_in_its_sleep_comes_back_with_the_new_weights(rollout, caplog):
    core = rollout.processes()[-1]
    rollout.run(rollout.service.sleep())
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: "engine 0 is lost" in caplog.text)
    time.sleep(3)
    rollout.run(rollout.service.wake("weights"))
    rollout.sync("a")
    assert "is back" not in caplog.text
    rollout.run(rollout.service.wake("kv_cache"))
    assert "engine 0 is back" in caplog.text
    check_serves(rollout, "a", rollout.generate(PROMPTS, PARAMS))
    rollout.run(rollout.service.sleep())
    rollout.run(rollout.service.wake("weights"))
    rollout.sync("b")
    rollout.run(rollout.service.wake("kv_cache"))
    check_serves(rollout, "b", rollout.generate(PROMPTS, PARAMS))


class NotLasting:
    """Engines of a transport that cannot let a restarted one catch up by itself."""

    def __init__(self, engines):
        self.open_transport, self.begin_update, self.load = engines.open_transport, engines.begin_update, engines.load
        self.engines = engines

    async def finish_update(self, version, message):
        await self.engines.finish_update(version, None)


def test_a_restarted_engine_is_sent_its_weights_again(rollout):
    resent = []

    async def resend(engine, version):
        resent.append(version)
        await rollout.transport.sync(rollout.sender, engine, version)

    rollout.service.resend = resend
    rollout.source.folder = rollout.models["b"]
    rollout.version += 1
    rollout.run(rollout.transport.sync(rollout.sender, NotLasting(rollout.service.engines), rollout.version))
    check_serves(rollout, "b", rollout.generate(PROMPTS, PARAMS))
    assert resent == []
    before = rollout.restarts()
    os.kill(rollout.processes()[-1], signal.SIGKILL)
    asking = rollout.begin(rollout.answers(PROMPTS, PARAMS))
    while rollout.restarts() == before:
        time.sleep(0.1)
    assert resent == [rollout.version]
    versions = {r.versions for r in asking.result(TIMEOUT_S) if not isinstance(r, EngineLost)}
    assert versions <= {((rollout.version, 0, TOKENS),)}
    check_serves(rollout, "b", rollout.generate(PROMPTS, PARAMS))
