"""Real engines through the cycle of a shared device. On CPU vLLM pauses and keeps its memory; all else is real."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from rollout_runs import running
from tiny_model import greedy_continuation, write_tiny_model

from megatron_fleet.agents.engine import SamplingParams
from megatron_fleet.cluster.inventory import local_inventory
from megatron_fleet.cluster.placement import Wanted, place

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + j * j) % 400 + 20 for j in range(5 + 3 * i)] for i in range(4)]
TOKENS = 16
PARAMS = [SamplingParams(0.0, TOKENS, (), 1)] * len(PROMPTS)


@pytest.fixture(scope="module")
def rollout(tmp_path_factory, episode_python):
    folder = tmp_path_factory.mktemp("rollout")
    models = {name: write_tiny_model(folder / name, seed) for name, seed in (("a", 1), ("b", 2))}
    engine = {"kv_cache_bytes": 256 << 20, "colocated": True, "start_timeout_s": 900}
    config, inventory = rollout_config(models["a"], engine=engine), local_inventory(os.environ)
    placement = place(inventory, Wanted.of(config))
    where = {"placement": placement.engines, "inventory": inventory, "transport": placement.transport}
    with running(config, folder, episode_python, models, **where) as started:
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
    check_serves(rollout, "b", asking.result(60))


def test_an_engine_killed_in_its_sleep_comes_back_with_the_new_weights(rollout, caplog):
    core = rollout.processes()[-1]
    rollout.run(rollout.service.sleep())
    os.kill(core, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while "engine 0 is lost" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.1)
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
