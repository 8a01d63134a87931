"""A whole rollout: Ray, vLLM, episode workers and the embedded fleet, all real."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from shm_weights import folder_publisher
from tiny_model import greedy_continuation, write_tiny_model

from megatron_fleet.agents.engine import EngineLost, SamplingParams
from megatron_fleet.data.loader import load_tasks
from megatron_fleet.envs.embedded.tasks import SHIPPED_TASKS
from megatron_fleet.rollout.requests import CollectRequest
from megatron_fleet.rollout.service import RolloutService

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + j * j) % 400 + 20 for j in range(5 + 3 * i)] for i in range(8)]


def sampled(temperature: float = 1.0, tokens: int = 24, seed: int | None = 1, stop: tuple[int, ...] = ()):
    return SamplingParams(temperature, tokens, stop, seed)


class Rollout:
    """The service under test, its two models and what publishes them."""

    def __init__(self, service: RolloutService, models: dict[str, Path]):
        self.service, self.models = service, models
        self.source, self.publisher = folder_publisher(models["a"], service.weight_client())
        self.version = 0

    def generate(self, prompts, params, sessions=None):
        async def run():
            engine = self.service.engine()
            return await asyncio.gather(
                *(engine.generate(p, q, str(i)) for i, (p, q) in enumerate(zip(prompts, params, strict=True)))
            )

        return asyncio.run(run())

    def greedy(self):
        return [g.token_ids.tolist() for g in self.generate(PROMPTS, [sampled(0.0)] * len(PROMPTS))]

    def publish(self, name: str) -> None:
        self.source.folder = self.models[name]
        self.version += 1
        self.publisher.publish(self.version)

    def collect(self, tasks: int = 4, samples: int = 4, seed: int = 0, on_progress=None):
        rows = load_tasks(SHIPPED_TASKS)[:tasks]
        return self.service.collect(CollectRequest(0, rows, samples, 1.0, "train", seed), on_progress)


@pytest.fixture(scope="module")
def rollout(tmp_path_factory, episode_python):
    folder = tmp_path_factory.mktemp("rollout")
    models = {name: write_tiny_model(folder / name, seed) for name, seed in (("a", 1), ("b", 2))}
    with RolloutService(rollout_config(models["a"]), folder, episode_python) as service:
        rollout = Rollout(service, models)
        yield rollout
        rollout.publisher.close()


def test_sampling_gives_tokens_their_logprobs_and_their_version(rollout):
    results = rollout.generate(PROMPTS, [sampled(seed=i) for i in range(len(PROMPTS))])
    for result in results:
        assert (len(result.token_ids), result.finish_reason) == (24, "length")
        assert result.versions == ((0, 0, 24),)
        assert np.all(result.logprobs < 0)
    (scores,) = rollout.service.score(
        [np.array([*p, *r.token_ids], np.int32) for p, r in zip(PROMPTS, results, strict=True)]
    )
    for prompt, result, score in zip(PROMPTS, results, scores, strict=True):
        assert score[0] == 0
        np.testing.assert_allclose(score[len(prompt) :], result.logprobs, atol=1e-5)


def test_a_stop_token_is_part_of_the_answer(rollout):
    (free,) = rollout.generate(PROMPTS[:1], [sampled()])
    stop = int(free.token_ids[5])
    cut = free.token_ids.tolist().index(stop) + 1
    (stopped,) = rollout.generate(PROMPTS[:1], [sampled(stop=(stop,))])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids.tolist()[:cut]
    np.testing.assert_array_equal(stopped.logprobs, free.logprobs[:cut])


def test_logprobs_are_those_of_the_temperature(rollout):
    (result,) = rollout.generate(PROMPTS[:1], [sampled(temperature=0.5)])
    ((score,),) = rollout.service.score([np.array([*PROMPTS[0], *result.token_ids], np.int32)])
    # At half the temperature sampled tokens are likelier than at one, on average by far more than rounding.
    assert result.logprobs.mean() > score[len(PROMPTS[0]) :].mean() + 0.05


def test_equal_seeds_give_equal_samples_whatever_else_runs(rollout):
    params = [sampled(seed=100 + i) for i in range(len(PROMPTS))]
    alone = [rollout.generate([p], [q])[0] for p, q in zip(PROMPTS, params, strict=True)]
    together = rollout.generate(PROMPTS, params)
    crowd = [[(3 * i + j) % 500 for j in range(1 + i % 37)] for i in range(120)]
    crowded = rollout.generate(PROMPTS + crowd, params + [sampled(seed=None)] * len(crowd))
    for one, two, three in zip(alone, together, crowded[: len(PROMPTS)], strict=True):
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
        np.testing.assert_array_equal(one.token_ids, three.token_ids)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)
        np.testing.assert_array_equal(one.logprobs, three.logprobs)


def test_a_prompt_beyond_the_context_is_refused_and_the_engine_lives(rollout):
    with pytest.raises(ValueError, match=r"(?i)max|long|context"):
        rollout.generate([[5] * 3000], [sampled()])
    assert rollout.generate([[5, 6]], [sampled(tokens=3)])[0].token_ids.shape == (3,)


def test_cancelled_requests_leave_the_engine(rollout):
    async def run() -> None:
        engine = rollout.service.engine()
        calls = [asyncio.create_task(engine.generate([9, i], sampled(tokens=600), str(i))) for i in range(64)]
        await asyncio.sleep(0.3)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await engine.generate([5], sampled(tokens=600), "after")

    before = rollout.service.stats().tokens
    asyncio.run(run())
    # One that had stayed would have ended before the one that came after it, and counted.
    assert rollout.service.stats().tokens - before == 600


def test_an_update_changes_what_is_said_and_the_version(rollout):
    expected = {name: greedy_continuation(path, PROMPTS, 24) for name, path in rollout.models.items()}
    assert expected["a"] != expected["b"]
    assert rollout.greedy() == expected["a"]
    for name in ("b", "a", "b"):
        rollout.publish(name)
        results = rollout.generate(PROMPTS, [sampled(0.0)] * len(PROMPTS))
        assert [r.token_ids.tolist() for r in results] == expected[name]
        assert {r.versions for r in results} == {((rollout.version, 0, 24),)}


def test_groups_come_in_order_and_repeat_with_their_seed(rollout):
    seen = []
    first, second = rollout.collect(on_progress=seen.append), rollout.collect()
    assert first.accounting.started == first.accounting.known == 16
    assert [g.index for g in first.groups] == [0, 1, 2, 3]
    for one, two in zip(first.groups, second.groups, strict=True):
        assert [t.sample for t in one.trajectories] == [0, 1, 2, 3]
        for x, y in zip(one.trajectories, two.trajectories, strict=True):
            np.testing.assert_array_equal(x.token_ids, y.token_ids)
            np.testing.assert_array_equal(x.behaviour_logprobs, y.behaviour_logprobs)
            assert {s.weight_version for s in x.spans if s.kind == "action"} == {rollout.version}
    firsts = [tuple(t.token_ids[t.action_mask][:8]) for g in first.groups for t in g.trajectories]
    assert len(set(firsts)) > 8  # samples of a group differ
    assert all(0 <= p.done <= p.total and p.total in (0, 16) for p in seen)


def test_a_killed_engine_comes_back_with_the_published_weights(rollout):
    before, greedy = rollout.service.stats().restarts, rollout.greedy()
    core = rollout.service.engine_processes()[-1]

    async def in_flight():
        engine = rollout.service.engine()
        calls = [asyncio.create_task(engine.generate([9, i], sampled(tokens=1900), str(i))) for i in range(4)]
        await asyncio.sleep(0.3)
        os.kill(core, signal.SIGKILL)
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(r, EngineLost) for r in asyncio.run(in_flight()))
    result = rollout.collect()  # waits for the new engine; no episode is lost
    assert result.accounting.known == 16
    assert rollout.greedy() == greedy
    assert {v for r in rollout.generate(PROMPTS, [sampled()] * 8) for v, _, _ in r.versions} == {rollout.version}
    assert rollout.service.stats().restarts == before + 1


def test_an_engine_killed_under_episodes_costs_time_and_nothing_else(rollout):
    undisturbed = rollout.collect(tasks=8, samples=8)
    pids = rollout.service.engine_processes()
    killer = threading.Timer(0.4, os.kill, (pids[0], signal.SIGKILL))  # the actor: its core must go with it
    killer.start()
    result = rollout.collect(tasks=8, samples=8)
    killer.join()
    assert result.accounting.known == 64
    assert result.accounting.aborted > 0
    assert [len(g.trajectories) for g in result.groups] == [len(g.trajectories) for g in undisturbed.groups]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_killed_worker_is_replaced_and_its_episodes_played_again(rollout):
    before = rollout.service.stats().restarts
    (worker,) = _processes("WorkerActor")
    killer = threading.Timer(0.3, os.kill, (worker, signal.SIGKILL))
    killer.start()
    result = rollout.collect(tasks=8, samples=8)
    killer.join()
    assert result.accounting.known == 64 and result.accounting.aborted > 0
    assert rollout.service.stats().restarts == before + 1


def _processes(name: str) -> list[int]:
    """Pids of this run's Ray workers of one class; other runs may be on this machine."""
    import psutil

    return [p.pid for p in psutil.Process().children(recursive=True) if f"ray::{name}" in " ".join(p.cmdline()[:1])]
