"""A whole rollout: Ray, vLLM, episode workers and the embedded fleet, all real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("vllm")

from rollout_config import rollout_config
from rollout_runs import TIMEOUT_S, engine_of, request, running, sampled_tokens
from tiny_model import greedy_continuation, write_tiny_model
from waiting import wait_until

from megatron_fleet.agents.token_engine import EngineLost, SamplingParams
from megatron_fleet.cluster.janitor import marked

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + j * j) % 400 + 20 for j in range(5 + 3 * i)] for i in range(8)]


def sampled(temperature: float = 1.0, tokens: int = 24, seed: int | None = 1, stop: tuple[int, ...] = ()):
    return SamplingParams(temperature, tokens, stop, seed)


async def begun(service, prompts, tokens: int):
    """Requests that an engine has begun to sample."""
    engine = await engine_of(service)
    params = [sampled(tokens=tokens)] * len(prompts) + [sampled(tokens=1)]
    calls = [
        asyncio.create_task(engine.generate(prompt, wanted, str(i)))
        for i, (prompt, wanted) in enumerate(zip([*prompts, [5]], params, strict=True))
    ]
    await calls.pop()  # the last one of a connection has its token after all others have some
    return calls


def greedy(rollout):
    return [g.token_ids.tolist() for g in rollout.generate(PROMPTS, [sampled(0.0)] * len(PROMPTS))]


@pytest.fixture(scope="module")
def rollout(tmp_path_factory, episode_python):
    folder = tmp_path_factory.mktemp("rollout")
    models = {name: write_tiny_model(folder / name, seed) for name, seed in (("a", 1), ("b", 2))}
    with running(rollout_config(models["a"]), folder, episode_python, models) as started:
        yield started


def test_the_controller_needs_no_torch():
    program = (
        "import sys, megatron_fleet.rollout.service, megatron_fleet.rollout.pool; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sampling_gives_tokens_their_logprobs_and_their_version(rollout):
    results = rollout.generate(PROMPTS, [sampled(seed=i) for i in range(len(PROMPTS))])
    for result in results:
        assert (len(result.token_ids), result.finish_reason) == (24, "length")
        assert result.versions == ((0, 0, 24),)
        assert np.all(result.logprobs < 0)
    sequences = [np.array([*p, *r.token_ids], np.int32) for p, r in zip(PROMPTS, results, strict=True)]
    (scores,) = rollout.run(rollout.service.score(sequences))
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
    ((score,),) = rollout.run(rollout.service.score([np.array([*PROMPTS[0], *result.token_ids], np.int32)]))
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


def test_engines_report_their_statistics_since_the_last_time(rollout):
    rollout.run(rollout.service.statistics())
    prompts = [[(5 * i + j) % 400 + 30 for j in range(70)] for i in range(4)]  # two whole blocks of the cache each
    for _ in range(2):
        rollout.generate(prompts, [sampled(tokens=8)] * 4)
    metrics = rollout.run(rollout.service.statistics())
    assert metrics["engine/generated_tokens"] == 2 * 4 * 8
    assert metrics["engine/prompt_tokens"] == 4 * 70 + 4 * (70 - 64)  # the second time two blocks are found
    assert metrics["engine/prefix_cache_hit_rate"] == 64 / (2 * 70)
    assert 1 <= metrics["engine/running_mean"] <= metrics["engine/running_max"] <= 4
    assert 0 < metrics["engine/kv_cache_usage_mean"] <= metrics["engine/kv_cache_usage_max"] < 1
    assert metrics["engine/preemptions"] == metrics["engine/waiting_max"] == 0 < metrics["engine/tokens_per_second"]
    assert rollout.run(rollout.service.statistics())["engine/generated_tokens"] == 0


def test_rays_monitor_of_memory_kills_nothing(rollout):
    """It would kill engines for memory that a checkpoint or an offloaded trainer takes."""
    (log,) = Path(tempfile.gettempdir(), f"mf-{rollout.service.run_id}").glob("ray/session_2*/logs/raylet.out")
    assert "`RAY_memory_monitor_refresh_ms` > 0 to enable the monitor" in log.read_text()


def test_a_prompt_beyond_the_context_is_refused_and_the_engine_lives(rollout):
    with pytest.raises(ValueError, match=r"(?i)max|long|context"):
        rollout.generate([[5] * 3000], [sampled()])
    assert rollout.generate([[5, 6]], [sampled(tokens=3)])[0].token_ids.shape == (3,)


def test_nobody_on_another_machine_can_connect(rollout):
    processes = [psutil.Process(pid) for pid in (os.getpid(), *marked(rollout.service.run_id))]
    listening = {
        (process.name(), connection.laddr.ip)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) >= 4 and {address for _, address in listening} <= {"127.0.0.1", "::ffff:127.0.0.1"}, listening


def test_cancelled_requests_leave_the_engine(rollout):
    async def tokens() -> int:
        service = rollout.service
        calls = await begun(service, [[9, i] for i in range(64)], 600)
        before = await sampled_tokens(service)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await (await engine_of(service)).generate([5], sampled(tokens=1200), "after")
        return await sampled_tokens(service) - before

    # One that had stayed would have ended before the one that came after it, and counted.
    assert rollout.run(tokens()) == 1200


def test_an_update_changes_what_is_said_and_the_version(rollout):
    expected = {name: greedy_continuation(path, PROMPTS, 24) for name, path in rollout.models.items()}
    assert expected["a"] != expected["b"]
    assert greedy(rollout) == expected["a"]
    for name in ("b", "a", "b"):
        rollout.sync(name)
        results = rollout.generate(PROMPTS, [sampled(0.0)] * len(PROMPTS))
        assert [r.token_ids.tolist() for r in results] == expected[name]
        assert {r.versions for r in results} == {((rollout.version, 0, 24),)}


def test_groups_come_in_order_and_repeat_with_their_seed(rollout):
    seen = []
    first, second = rollout.collect(on_episode=seen.append), rollout.collect()
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
    assert sorted((t.group, t.sample) for t in seen) == [(g, s) for g in range(4) for s in range(4)]


def assert_equal(one, two):
    for first, second in zip(one.groups, two.groups, strict=True):
        for x, y in zip(first.trajectories, second.trajectories, strict=True):
            np.testing.assert_array_equal(x.token_ids, y.token_ids)
            np.testing.assert_array_equal(x.behaviour_logprobs, y.behaviour_logprobs)
            assert (x.reward, x.outcome) == (y.reward, y.outcome)


@pytest.fixture(scope="module")
def undisturbed(rollout):
    """What 64 episodes are when nothing happens to them. No test that has it changes the weights."""
    return rollout.collect(tasks=8, samples=8)


def test_two_collections_share_the_places_and_give_what_each_gives_alone(rollout, undisturbed):
    big, small = request(tasks=8, samples=8), request(tasks=4, samples=2, purpose="eval")
    alone = [undisturbed, rollout.run(rollout.service.collect(small))]
    order = []

    async def both():
        async def play(name, one):
            result = await rollout.service.collect(one, lambda _: order.append(name))
            order.append(f"{name} ended")
            return result

        return await asyncio.gather(play("big", big), play("small", small))

    together = rollout.run(both())
    for one, two in zip(alone, together, strict=True):
        assert_equal(one, two)
        assert one.accounting == two.accounting
    assert order.count("big") == 64 and order.count("small") == 8
    # 64 episodes have 32 places, so the later collection begins when half of the earlier one has been handed out.
    assert order[:16] == ["big"] * 16


def test_cancelling_a_collection_stops_its_episodes_and_no_others(rollout):
    alone = rollout.collect(samples=2)

    async def play():
        service, ended = rollout.service, []
        unwanted = asyncio.create_task(service.collect(request(tasks=8, samples=320), ended.append))
        while not ended:
            await asyncio.sleep(0.01)
        other = asyncio.create_task(service.collect(request(samples=2)))
        await asyncio.sleep(0.2)
        unwanted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unwanted
        assert len(ended) < 8 * 320
        result = await other
        await (await engine_of(service)).generate(
            [5], sampled(tokens=600), "after"
        )  # what was cut off has ended before
        return result, await sampled_tokens(service)

    result, tokens = rollout.run(play())
    assert_equal(alone, result)
    time.sleep(1)
    assert rollout.run(sampled_tokens(rollout.service)) == tokens
    assert_equal(rollout.collect(samples=2), alone)


def test_a_callback_that_fails_ends_its_collection_alone(rollout):
    def fail(trajectory):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        rollout.collect(tasks=8, samples=8, on_episode=fail)
    assert rollout.collect().accounting.known == 16


@pytest.mark.in_turn(number=1, of=2)
def test_a_killed_engine_comes_back_with_the_weights_of_the_last_update(rollout):
    before, expected = rollout.restarts(), greedy(rollout)
    core = rollout.processes()[-1]
    # What it could not remove goes with the run's folder.
    assert "/dev/shm/" not in Path(f"/proc/{core}/maps").read_text()
    folder = Path(tempfile.gettempdir(), f"mf-{rollout.service.run_id}")
    sockets = [line.split()[-1] for line in Path(f"/proc/{core}/net/unix").read_text().splitlines()]
    assert sum(path.startswith(f"{folder}/") and "/ray/" not in path for path in sockets) >= 2
    assert psutil.Process(core).nice() == os.nice(0)

    async def in_flight():
        calls = await begun(rollout.service, [[9, i] for i in range(4)], 1900)
        os.kill(core, signal.SIGKILL)
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(r, EngineLost) for r in rollout.run(in_flight()))
    result = rollout.collect()  # waits for the new engine; no episode is lost
    assert result.accounting.known == 16
    assert greedy(rollout) == expected
    assert {v for r in rollout.generate(PROMPTS, [sampled()] * 8) for v, _, _ in r.versions} == {rollout.version}
    assert rollout.restarts() == before + 1


@pytest.mark.in_turn(number=0, of=2)
def test_an_engine_killed_under_episodes_costs_time_and_nothing_else(rollout, undisturbed):
    pids = rollout.processes()
    result = killed_while_playing(rollout, pids[0])  # the actor: its core must go with it
    assert result.accounting.known == 64
    assert result.accounting.aborted > 0
    assert [len(g.trajectories) for g in result.groups] == [len(g.trajectories) for g in undisturbed.groups]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.in_turn(number=0, of=2)
def test_a_killed_worker_is_replaced_and_its_episodes_played_again(rollout):
    before = rollout.restarts()
    (worker,) = processes(rollout, "ray::WorkerActor")
    result = killed_while_playing(rollout, worker)
    assert result.accounting.known == 64 and result.accounting.aborted > 0
    assert rollout.restarts() == before + 1


@pytest.mark.in_turn(number=1, of=2)
def test_a_killed_environment_server_is_replaced_and_its_episodes_played_again(rollout, undisturbed):
    before = rollout.restarts()
    assert rollout.run(rollout.service.environment_available()) is None
    (server,) = processes(rollout, "embedded_fleet.server")
    (host,) = psutil.Process(server).children()
    result = killed_while_playing(rollout, server)
    assert result.accounting.known == 64 and result.accounting.aborted > 0 and result.accounting.retried == 0
    assert rollout.restarts() == before + 1
    (again,) = processes(rollout, "embedded_fleet.server")
    assert again != server and not host.is_running() and psutil.Process(again).children()
    assert rollout.run(rollout.service.environment_available()) is None
    assert_equal(rollout.collect(tasks=8, samples=8), undisturbed)


def test_an_environment_that_cannot_be_had_is_said_so(rollout):
    (server,) = processes(rollout, "embedded_fleet.server")
    os.kill(server, signal.SIGKILL)
    reason = rollout.run(rollout.service.environment_available())
    assert reason is not None and reason.startswith(("the environment server is being restarted", "http://127"))
    assert rollout.collect().accounting.known == 16
    (server,) = processes(rollout, "embedded_fleet.server")
    os.kill(server, signal.SIGSTOP)
    assert "does not answer" in rollout.run(rollout.service.environment_available())
    os.kill(server, signal.SIGCONT)
    wait_until(lambda: rollout.run(rollout.service.environment_available()) is None)


def killed_while_playing(rollout, pid: int):
    """Results of 64 episodes when a process is killed as soon as some of them have ended and others are played."""
    ended = []
    playing = rollout.begin(rollout.service.collect(request(tasks=8, samples=8), ended.append))
    wait_until(lambda: ended)
    os.kill(pid, signal.SIGKILL)
    return playing.result(TIMEOUT_S)


def processes(rollout, name: str) -> list[int]:
    """Pids of this run's processes with ``name`` on their command line."""
    found = {pid: " ".join(psutil.Process(pid).cmdline()) for pid in marked(rollout.service.run_id)}
    return [pid for pid, command in found.items() if name in command]
