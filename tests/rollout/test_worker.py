"""EpisodeWorker: isolation, order, slots, abort. Engine and environment are scripted here."""

import asyncio
import pickle
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from waiting import LOOP_TIME, in_simulated_time, until

pytest.importorskip("openenv")

from megatron_fleet.agents.token_engine import EngineLost, EngineRefused, Generation
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import AgentConfig, EngineConfig, EnvConfig, RolloutConfig, SamplingConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs import provision
from megatron_fleet.envs.base import EnvLost, Observation, Reward
from megatron_fleet.models.chat.tokenizer import Tokenizer, train_tokenizer
from megatron_fleet.models.qwen3.chat import QWEN3_TOKENS
from megatron_fleet.rollout import policy as policy_module
from megatron_fleet.rollout import worker as worker_module
from megatron_fleet.rollout.policy import EngineAccess
from megatron_fleet.rollout.requests import EpisodeSpec
from megatron_fleet.rollout.worker import EpisodeWorker, LoopLag

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class World:
    """One engine and all environments; what happens is named in the task's prompt."""

    tokenizer: object
    in_flight: int = 0
    most_in_flight: int = 0
    opened: int = 0
    closed: int = 0
    reset_s: float = 0.0
    requests: list = field(default_factory=list)

    async def generate(self, prompt_ids, params, session, images=()):
        self.requests.append((session, params))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            prompt = self.tokenizer.decode(prompt_ids)
            await asyncio.sleep(30 if "HANG" in prompt else 0.01)
        finally:
            self.in_flight -= 1
        if "ENGINE" in prompt:
            raise EngineLost("gone")
        if "BUG" in prompt:
            raise KeyError("a bug")
        ids = [*self.tokenizer.encode("42 <done>"), self.tokenizer.special["<|im_end|>"]]
        return Generation(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), "stop", ((3, 0, len(ids)),))

    def environment(self, config, url, episode, token):
        assert isinstance(config, EnvConfig) and url == "http://127.0.0.1:1" and episode
        self.opened += 1
        return WorldEnvironment(self)


@dataclass
class WorldEnvironment:
    world: World

    async def reset(self, task):
        await asyncio.sleep(self.world.reset_s)
        if "NOENV" in task.prompt:
            raise EnvLost("no image")
        return Observation(task.prompt, (TOOL,))

    async def verify(self, final_answer, conversation):
        return Reward(float(final_answer == "42"), "compared")

    async def close(self):
        self.world.closed += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the answer"], 300, folder, QWEN3_TOKENS)
    return folder


@pytest.fixture
def world(folder, monkeypatch):
    world = World(Tokenizer(folder))
    monkeypatch.setattr(policy_module, "connect", lambda endpoints, token, timeout_s, host: world)
    monkeypatch.setattr(worker_module, "make_environment", world.environment)
    monkeypatch.setattr(provision, "time", LOOP_TIME)
    return world


def make_worker(folder, env=None, eval_addresses=(), **changes):
    limits = {
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "max_context": 2000,
        "workers": 2,
        "episodes_in_flight": 7,
    }
    rollout = RolloutConfig(sampling=SamplingConfig(max_tokens_per_turn=40, max_turns=3), **(limits | changes))
    sections = (rollout.model_dump(), (env or EnvConfig()).model_dump(), AgentConfig().model_dump())
    access = EngineAccess(str(folder), ["127.0.0.1:2"], "secret", eval_addresses=eval_addresses)
    return EpisodeWorker(access, *sections, "http://127.0.0.1:1")


@pytest.fixture
def worker(folder, world):
    return make_worker(folder)


def spec(prompt: str, sample: int = 0) -> EpisodeSpec:
    task = Task(key=f"task {prompt}", prompt=prompt, env_key="desk", verifier_code="")
    return EpisodeSpec(task, group=3, sample=sample, step=9, temperature=0.7, seed=11)


async def plays(worker, *specs):
    return await asyncio.gather(*(worker.play(each) for each in specs))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(EngineRefused("no"), Outcome.REFUSED), (TypeError("None"), Outcome.REFUSED), (OSError("cut"), Outcome.ABORTED)],
)
async def test_what_a_program_raises_will_recur_and_a_lost_connection_may_not(worker, monkeypatch, error, outcome):
    async def play(spec, environment):
        raise error

    monkeypatch.setattr(worker.policy, "play", play)
    trajectory = await worker.play(spec("fine"))
    assert trajectory.outcome is outcome and trajectory.reward_reason.endswith(f"{type(error).__name__}: {error}")


@in_simulated_time
async def test_each_spec_has_its_trajectory_whatever_happens(worker, world, caplog):
    batch = [spec(p, i) for i, p in enumerate(["fine", "ENGINE", "NOENV", "BUG", "fine too"])]
    trajectories = await plays(worker, *batch)
    assert [(t.task_key, t.group, t.sample) for t in trajectories] == [(s.task.key, 3, s.sample) for s in batch]
    assert [(t.outcome, t.reward) for t in trajectories] == [
        (Outcome.COMPLETED, 1.0), (Outcome.ABORTED, None), (Outcome.ENV_FAILED, None),
        (Outcome.REFUSED, None), (Outcome.COMPLETED, 1.0),
    ]  # fmt: skip
    assert trajectories[3].reward_reason == "internal error: KeyError: 'a bug'" and "KeyError" in caplog.text
    assert world.opened == world.closed == 5
    for trajectory in pickle.loads(pickle.dumps(trajectories)):
        trajectory.check()


@in_simulated_time
async def test_episodes_share_the_workers_slots(worker, world):
    await plays(worker, *(spec("fine", i) for i in range(20)))
    assert world.most_in_flight == 4  # 7 over 2 workers, rounded up
    assert world.opened == world.closed == 20


@in_simulated_time
@pytest.mark.parametrize(("most", "played"), [({"engine": {"replicas": 2, "max_num_seqs": 3}}, 3), ({}, 128)])
async def test_with_auto_a_worker_has_its_share_of_the_most_that_may_play(folder, world, most, played):
    worker = make_worker(folder, episodes_in_flight="auto", **most)
    await plays(worker, *(spec("fine", i) for i in range(200)))
    assert world.most_in_flight == played


@in_simulated_time
async def test_an_evaluation_has_slots_and_engines_of_its_own(folder, world, monkeypatch):
    pools = {}

    def connect(endpoints, token, timeout_s, host):
        pools[tuple(endpoints)] = pool = World(world.tokenizer)
        return pool

    monkeypatch.setattr(policy_module, "connect", connect)
    worker = make_worker(folder, engine={"replicas": 2}, eval_addresses=["127.0.0.1:3"])
    own, evaluating = pools["127.0.0.1:2",], pools["127.0.0.1:3",]
    hanging = asyncio.create_task(plays(worker, *(spec("HANG", i) for i in range(12))))
    await asyncio.sleep(0.1)
    assert own.in_flight == 4
    evaluation = [replace(spec("fine", i), engines="eval", collection=7, trained=False) for i in range(20)]
    assert all(t.outcome is Outcome.COMPLETED for t in await plays(worker, *evaluation))
    assert evaluating.most_in_flight == 2  # half of 7, for one engine beside two, over 2 workers
    assert own.most_in_flight == 4
    await worker.abort(0)
    await hanging


def test_engines_that_join_and_leave_are_the_rollouts(folder):
    policy = make_worker(folder, eval_addresses=["127.0.0.1:3"]).policy

    def known():
        return {kind: [one.endpoint for one in pool._replicas] for kind, pool in policy._engines.items()}

    policy.engine_moved("", "127.0.0.1:4")
    assert known() == {"rollout": ["127.0.0.1:2", "127.0.0.1:4"], "eval": ["127.0.0.1:3"]}
    policy.engine_leaves("127.0.0.1:2")
    policy.engine_moved("127.0.0.1:3", "127.0.0.1:5")
    assert known() == {"rollout": ["127.0.0.1:4"], "eval": ["127.0.0.1:5"]}


@in_simulated_time
async def test_abort_returns_every_episode_of_its_collection_and_the_worker_goes_on(worker, world):
    running = asyncio.create_task(plays(worker, *(spec("HANG", i) for i in range(12))))
    await asyncio.sleep(0.1)
    assert (world.opened, world.in_flight) == (8, 4)  # as many again wait, started, for a place
    other = asyncio.create_task(worker.play(replace(spec("fine"), collection=7)))
    await worker.abort(0)
    trajectories = await running
    assert [(t.outcome, t.reward, t.reward_reason) for t in trajectories] == [
        (Outcome.ABORTED, None, "the run was stopped")
    ] * 12
    assert (await other).outcome is Outcome.COMPLETED
    assert world.opened == world.closed == 9 and world.in_flight == 0
    assert (await worker.play(replace(spec("fine"), collection=7))).outcome is Outcome.COMPLETED


@in_simulated_time
async def test_abort_before_the_first_await_or_the_episode_is_not_lost(worker, world):
    running = asyncio.create_task(worker.play(spec("HANG")))
    await asyncio.sleep(0)
    await worker.abort(0)
    assert (await running).outcome is Outcome.ABORTED
    late = await worker.play(spec("HANG"))  # overtaken on the way
    assert late.outcome is Outcome.ABORTED and world.opened == 0


@in_simulated_time
async def test_an_environment_that_gives_nothing_back_is_left_alone(folder, world):
    provisioning = {"breaker_window": 4, "breaker_threshold": 0.75, "breaker_pause_s": 0.2}
    worker = make_worker(folder, env=EnvConfig(provisioning=provisioning))
    bad, good = spec("NOENV"), replace(spec("fine"), task=replace(spec("fine").task, env_key="shop"))
    await worker.play(spec("fine"))
    first = await plays(worker, bad, bad, bad)
    assert [t.reward_reason for t in first] == ["environment lost: no image"] * 3
    refused = await plays(worker, bad, good, spec("fine"))
    assert [(t.outcome, t.reward) for t in refused] == [
        (Outcome.ENV_FAILED, None), (Outcome.COMPLETED, 1.0), (Outcome.ENV_FAILED, None)
    ]  # fmt: skip
    assert "environment desk is in quarantine" in refused[0].reward_reason
    assert [t.metrics.get("quarantined", 0) for t in refused] == [1, 0, 1]
    assert [t.metrics["breaker_open"] for t in refused] == [1, 0, 1]
    assert world.opened == world.closed == 5
    await asyncio.sleep(0.2)
    probed = await plays(worker, spec("fine"), bad)
    assert [t.outcome for t in probed] == [Outcome.COMPLETED, Outcome.ENV_FAILED]
    assert "quarantine" in probed[1].reward_reason  # one probe at a time
    assert (await worker.play(spec("fine"))).metrics["breaker_open"] == 0
    for trajectory in [*refused, *probed]:
        trajectory.check()


@in_simulated_time
async def test_failures_of_a_server_that_was_replaced_are_forgotten(folder, world):
    worker = make_worker(folder, env=EnvConfig(provisioning={"breaker_window": 2, "breaker_threshold": 1.0}))
    await plays(worker, spec("NOENV"), spec("NOENV"))
    assert "quarantine" in (await worker.play(spec("fine"))).reward_reason
    await worker.forget_failures()
    assert (await worker.play(spec("fine"))).outcome is Outcome.COMPLETED


@in_simulated_time
async def test_a_dead_engine_is_no_fault_of_the_environment(folder, world):
    worker = make_worker(folder, env=EnvConfig(provisioning={"breaker_window": 2, "breaker_threshold": 0.5}))
    for _ in range(3):
        played = await plays(worker, spec("ENGINE"), spec("BUG"))
        assert [t.outcome for t in played] == [Outcome.ABORTED, Outcome.REFUSED]
    assert (await worker.play(spec("fine"))).outcome is Outcome.COMPLETED


@in_simulated_time
async def test_starting_uses_up_no_time_of_the_episode(folder, world):
    worker = make_worker(
        folder, episode_timeout_s=3, env=EnvConfig(provisioning={"starts_at_once": 1, "max_starts_at_once": 1})
    )
    world.reset_s = 0.5
    trajectories = await plays(worker, *(spec("fine", i) for i in range(8)))
    assert {t.outcome for t in trajectories} == {Outcome.COMPLETED}
    assert max(t.metrics["provision_s"] for t in trajectories) > 3


@in_simulated_time
async def test_cancelling_run_stops_its_episodes(worker, world):
    running = asyncio.create_task(plays(worker, *(spec("HANG", i) for i in range(2))))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: world.closed == 2)
    assert world.in_flight == 0


@in_simulated_time
async def test_seeds_differ_by_sample_and_step_and_repeat_for_another_attempt(worker, world):
    one = spec("fine")
    specs = [one, one, replace(one, sample=1), replace(one, attempt=1), replace(one, step=10), replace(one, seed=None)]
    seeds = []
    for s in specs:
        await worker.play(s)
        seeds.append(world.requests[-1][1].seed)
    assert seeds[0] == seeds[1] == seeds[3] and len(set(seeds[1:])) == 4 and seeds[-1] is None
    assert {p.temperature for _, p in world.requests} == {0.7}
    assert len({session for session, _ in world.requests}) == 4  # sample, attempt and step name a new episode
    await worker.play(replace(one, collection=1))
    assert world.requests[-1][1].seed == seeds[0] and world.requests[-1][0] not in {s for s, _ in world.requests[:-1]}


def test_a_folder_without_tokenizer_is_refused(tmp_path, world):
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        make_worker(tmp_path)


@in_simulated_time
async def test_experts_are_asked_for_where_they_are_replayed(folder, world):
    worker = make_worker(folder, engine=EngineConfig(routing_replay=True))
    await plays(worker, spec("fine"), replace(spec("fine"), trained=False))
    assert sorted(params.routing_start is None for _, params in world.requests) == [False, True]


@in_simulated_time
async def test_a_blocking_call_shows_as_lag_of_the_loop(caplog):
    lag = LoopLag()
    assert lag.quantile(0.99) == 0
    with lag.watching():
        await asyncio.sleep(0.12)
        assert lag.quantile(1.0) == pytest.approx(0)
        asyncio.get_running_loop().now += 1.5  # a call that lasts so long
        await asyncio.sleep(0.06)
    assert lag.quantile(1.0) == pytest.approx(0.12 + 1.5 - 0.15) and lag.quantile(0.01) == pytest.approx(0)
    assert "the event loop was blocked for 1.5 s" in caplog.text


async def test_the_lag_is_watched_until_the_last_has_left():
    lag, before = LoopLag(), asyncio.all_tasks()
    with lag.watching():
        with lag.watching():
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks() - before) == 1
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks() - before) == 1
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    with lag.watching():
        await asyncio.sleep(0.11)
    assert lag.quantile(1.0) > 0 or lag._samples
