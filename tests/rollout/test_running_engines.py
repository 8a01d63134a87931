"""Updates that fail in a running rollout, and engines that share their devices with the trainer.

Nothing is answered with half a version, and the next attempt is whole. On CPU a sleeping engine pauses and keeps its
memory; all else is real.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from rollout_runs import TIMEOUT_S, engine_of, running, starting_core
from tiny_model import greedy_continuation, logprobs, write_tiny_model
from waiting import wait_until

from megatron_fleet.agents.token_engine import EngineLost, SamplingParams
from megatron_fleet.cluster import restarts
from megatron_fleet.rollout import components
from megatron_fleet.weight_sync.shm.board import SUMMED

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + j * j) % 400 + 20 for j in range(5 + 3 * i)] for i in range(4)]
TOKENS = 24


def greedy(tokens=TOKENS):
    return [SamplingParams(0.0, tokens, (), 1)] * len(PROMPTS)


def check_answers(rollout, name, results):
    assert [r.token_ids.tolist() for r in results] == greedy_continuation(rollout.models[name], PROMPTS, TOKENS)
    assert {r.versions for r in results} == {((rollout.version, 0, TOKENS),)}


def check_serves(rollout, name):
    check_answers(rollout, name, rollout.generate(PROMPTS, greedy()))


def begin_requests(rollout):
    """Requests that are sent while something else goes on."""
    asking = rollout.begin(rollout.answers(PROMPTS, greedy()))
    time.sleep(0.3)
    return asking


@pytest.fixture(scope="module")
def rollout(tmp_path_factory, episode_python):
    folder = tmp_path_factory.mktemp("rollout")
    models = {name: write_tiny_model(folder / name, seed) for name, seed in (("a", 1), ("b", 2))}
    config = rollout_config(models["a"], engine={"colocated": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(components, "MAX_RESTARTS", 9)  # these tests kill more often
        patch.setattr(restarts, "LONGEST_PAUSE_S", 1.0)
        with running(config, folder, episode_python, models) as started:
            yield started


@pytest.mark.nightly(minutes=0.5)
def test_an_engine_whose_core_is_killed_while_it_starts_is_started_again(rollout):
    """The first test of the file: the engine that all others use is starting."""
    cores = []
    wait_until(lambda: cores.append(starting_core(rollout.service.run_id)) or cores[-1])
    os.kill(cores[-1], signal.SIGKILL)
    check_serves(rollout, "a")
    assert rollout.restarts() == 1


def test_requests_in_flight_go_on_under_the_new_weights(rollout):
    tokens = 1900  # as many as the context holds: they must outlast the update

    async def begin():
        engine = await engine_of(rollout.service)
        params = [*greedy(tokens), SamplingParams(0.0, 1, (), 1)]
        calls = [engine.generate(p, q, str(i)) for i, (p, q) in enumerate(zip([*PROMPTS, [5]], params, strict=True))]
        *asking, last = map(asyncio.create_task, calls)
        await last  # the last one of a connection has its token after all others have some
        return asyncio.gather(*asking)

    async def end(asking):
        return await asking

    rollout.sync("a")
    asking = rollout.run(begin())
    rollout.sync("b")
    for prompt, result in zip(PROMPTS, rollout.run(end(asking)), strict=True):
        (first, start, cut), (second, again, end) = result.versions
        assert (first, second, start, again, end) == (rollout.version - 1, rollout.version, 0, cut, tokens)
        assert 0 < cut < tokens
        said = result.token_ids.tolist()
        assert said[: min(cut, 16)] == greedy_continuation(rollout.models["a"], [prompt], min(cut, 16))[0]
        after = min(16, end - cut)
        assert said[cut : cut + after] == greedy_continuation(rollout.models["b"], [prompt + said[:cut]], after)[0]


@pytest.mark.nightly(minutes=0.5)
def test_an_engine_that_leaves_hands_its_turns_over_as_they_are(rollout):
    """The engine that takes them is the same slot's next one, with the same weights."""
    tokens = 1900  # as many as the context holds

    async def leave():
        client, (slot,) = await engine_of(rollout.service), rollout.service._pool.engines
        calls = [client.generate(prompt, *greedy(tokens)[:1], str(i)) for i, prompt in enumerate(PROMPTS)]
        asking = asyncio.gather(*calls)
        await client.generate([5], SamplingParams(0.0, 1, (), 1), "last")
        left = slot.endpoint
        client.leaves(left)
        await slot.interrupt()
        client.moved(left, "")
        os.kill((await slot.processes())[-1], signal.SIGKILL)
        while slot.endpoint == left or not slot.is_serving:
            await asyncio.sleep(0.1)
        client.moved("", slot.endpoint)
        return await asking

    rollout.sync("a")
    for result, prompt in zip(rollout.run(leave()), PROMPTS, strict=True):
        assert result.interruptions == 1 and result.finish_reason == "length"
        (_, start, cut), (version, again, end) = result.versions
        assert (start, again, end, version) == (0, cut, tokens, rollout.version) and 0 < cut < tokens
        said = result.token_ids.tolist()
        for begin in (0, cut):  # before the change, and after it
            few = min(16, tokens - begin, cut if begin == 0 else tokens)
            assert (
                said[begin : begin + few] == greedy_continuation(rollout.models["a"], [prompt + said[:begin]], few)[0]
            )


class Tearing:
    """Changes a byte after its checksum was taken and before engines look; the next engine finds it mended."""

    def __init__(self, rollout):
        self.rollout, self.engines = rollout, rollout.service.engines
        self.open_transport, self.begin_update = self.engines.open_transport, self.engines.begin_update
        self.finish_update = self.engines.finish_update

    async def load(self, message):
        sender, board = self.rollout.sender.sender, self.rollout.transport._memory.board
        for bucket in range(len(sender._layout.buckets)):
            await asyncio.to_thread(board.wait, SUMMED, bucket, message["round"])
        torn = sender._layout.spans[-1][0] + 3
        sender._memory[torn] ^= 1
        await self.engines.load(message)
        sender._memory[torn] ^= 1


@pytest.mark.in_turn(number=0, of=3)
def test_a_torn_update_is_repeated_on_a_fresh_engine(rollout):
    before = rollout.restarts()
    rollout.source.folder = rollout.models["a"]
    rollout.version += 1
    rollout.run(rollout.transport.sync(rollout.sender, Tearing(rollout), rollout.version))
    check_serves(rollout, "a")
    assert rollout.restarts() == before + 1


@pytest.mark.in_turn(number=1, of=3)
def test_an_engine_killed_in_an_update_comes_back_with_it(rollout):
    before, core = rollout.restarts(), rollout.processes()[-1]
    asking = []

    def kill():
        rollout.source.before_write = None
        time.sleep(0.5)  # the engine waits for the first bucket, without any weights
        asking.append(begin_requests(rollout))
        os.kill(core, signal.SIGKILL)

    rollout.source.before_write = kill
    rollout.sync("b")
    expected = greedy_continuation(rollout.models["b"], PROMPTS, TOKENS)
    for result, tokens in zip(asking[0].result(TIMEOUT_S), expected, strict=True):
        assert isinstance(result, EngineLost) or (
            result.versions == ((rollout.version, 0, TOKENS),) and result.token_ids.tolist() == tokens
        )
    check_serves(rollout, "b")
    assert rollout.restarts() == before + 1


@pytest.mark.in_turn(number=1, of=2)
def test_a_trainer_that_gives_an_update_up_leaves_nobody_serving_until_the_next_one(rollout):
    asking = []

    def fail():
        rollout.source.before_write = None
        time.sleep(0.5)
        asking.append(begin_requests(rollout))
        raise OSError("the trainer failed")

    rollout.source.before_write = fail
    with pytest.raises(OSError, match="the trainer failed"):
        rollout.sync("a")
    asking.append(begin_requests(rollout))
    time.sleep(3)
    assert not asking[1].done() or all(isinstance(r, EngineLost) for r in asking[1].result())
    rollout.version -= 1
    rollout.sync("a")
    for result in [answer for some in asking for answer in some.result(TIMEOUT_S)]:
        assert isinstance(result, EngineLost) or result.versions == ((rollout.version, 0, TOKENS),)
    check_serves(rollout, "a")


def test_requests_go_on_after_a_sleep_with_the_weights_of_then(rollout):
    """Each token is what the weights of its version say, on both sides of the seam, greedy and sampled."""
    tokens = 1900  # as many as the context holds: they must outlast the sleep
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2]]
    sampled = SamplingParams(1.0, tokens, (), 5)

    async def begin():
        engine = await engine_of(rollout.service)
        params = [SamplingParams(0.0, tokens, (), None), sampled, sampled]
        calls = [engine.generate(p, q, str(i)) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
        asking = [asyncio.create_task(call) for call in calls]
        await engine.generate([5], SamplingParams(0.0, 1, (), 1), "last")
        return asyncio.gather(*asking)

    async def end(asking):
        return await asking

    rollout.sync("a")
    asking = rollout.run(begin())
    rollout.run(rollout.service.sleep())
    rollout.run(rollout.service.wake("weights"))
    rollout.sync("b")
    rollout.run(rollout.service.wake("kv_cache"))
    results = rollout.run(end(asking))
    for prompt, result in zip(prompts, results, strict=True):
        (first, start, cut), (second, again, last) = result.versions
        assert (first, second, start, again, last) == (rollout.version - 1, rollout.version, 0, cut, tokens)
        assert 0 < cut < tokens and len(result.token_ids) == len(result.logprobs) == tokens
        assert (result.interruptions, result.recomputed, result.finish_reason) == (1, len(prompt) + cut, "length")
        ids = [*prompt, *result.token_ids.tolist()]
        for name, where in (("a", slice(0, cut)), ("b", slice(cut, tokens))):
            said = logprobs(rollout.models[name], ids)[len(prompt) - 1 : -1][where]
            chosen = result.token_ids[where]
            if result is results[0]:
                assert chosen.tolist() == said.argmax(-1).tolist()
            else:
                differences = np.abs(result.logprobs[where] - said[np.arange(len(chosen)), chosen])
                # two float32 implementations: 1e-6 for most tokens, 1e-5 for the least likely of 1,900
                assert np.median(differences) < 1e-6 and differences.max() < 5e-5


def test_requests_wait_until_the_engine_is_wholly_awake(rollout):
    assert "frees no memory on platform 'cpu'" in rollout.run(rollout.service.sleep())
    asking = rollout.begin(rollout.answers(PROMPTS, greedy()))
    rollout.run(rollout.service.wake("weights"))
    rollout.sync("b")
    time.sleep(1)
    assert not asking.done()
    rollout.run(rollout.service.wake("kv_cache"))
    check_answers(rollout, "b", asking.result(TIMEOUT_S))


@pytest.mark.in_turn(number=2, of=3)
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
    check_serves(rollout, "a")
    rollout.run(rollout.service.sleep())
    rollout.run(rollout.service.wake("weights"))
    rollout.sync("b")
    rollout.run(rollout.service.wake("kv_cache"))
    check_serves(rollout, "b")


class NotLasting:
    """Engines of a transport that cannot let a restarted one catch up by itself."""

    def __init__(self, engines):
        self.open_transport, self.begin_update, self.load = engines.open_transport, engines.begin_update, engines.load
        self.engines = engines

    async def finish_update(self, version, message):
        await self.engines.finish_update(version, None)


@pytest.mark.nightly(minutes=0.5)
def test_a_restarted_engine_is_sent_its_weights_again(rollout):
    resent = []

    async def resend(engine, version):
        resent.append(version)
        await rollout.transport.sync(rollout.sender, engine, version)

    rollout.service.resend = resend
    rollout.source.folder = rollout.models["b"]
    rollout.version += 1
    rollout.run(rollout.transport.sync(rollout.sender, NotLasting(rollout.service.engines), rollout.version))
    check_serves(rollout, "b")
    assert resent == []
    before = rollout.restarts()
    os.kill(rollout.processes()[-1], signal.SIGKILL)
    asking = rollout.begin(rollout.answers(PROMPTS, greedy()))
    while rollout.restarts() == before:
        time.sleep(0.1)
    assert resent == [rollout.version]
    versions = {r.versions for r in asking.result(TIMEOUT_S) if not isinstance(r, EngineLost)}
    assert versions <= {((rollout.version, 0, TOKENS),)}
    check_serves(rollout, "b")
