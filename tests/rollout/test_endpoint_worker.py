"""Collections with the model behind an endpoint: real HTTP, scripted environments, the workers in this process."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("ray")

from agent_doubles import TASK, TOOLS, ScriptedEnvironment
from chat_doubles import answering
from chat_server import MODEL, ChatServer, call, error, serving
from rollout_config import rollout_config
from waiting import in_simulated_time

from megatron_fleet.agents import chat_client
from megatron_fleet.agents.chat_client import Dialect
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.schema import AgentConfig, EnvConfig
from megatron_fleet.config.sections.evaluation import EndpointConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvLost, Observation
from megatron_fleet.rollout import worker as worker_module
from megatron_fleet.rollout.collector import Collector
from megatron_fleet.rollout.policy import EndpointAccess
from megatron_fleet.rollout.requests import CollectRequest
from megatron_fleet.rollout.worker import EpisodeWorker

ANSWER = {"content": "3 <done>"}
SEARCH = {"tool_calls": [call("search", {})]}
NOWHERE = ChatServer(lambda number, body: ANSWER, url="http://127.0.0.1:1/v1")
"""For workers whose requests are answered by `answering`."""


@pytest.fixture
def opened(monkeypatch):
    """Environments that were opened; the task's prompt is what the user says."""
    opened = []

    def make(config, url, name, token):
        lost = "gone" in name and name.split("/")[3] == "0"
        first = EnvLost("gone") if lost else Observation(TASK.prompt, TOOLS)
        env = ScriptedEnvironment(reset_script=[first], step_script=[Observation("x")] * 9)
        opened.append(env)
        env.open_beside = sum(not other.closed for other in opened)
        return env

    monkeypatch.setattr(worker_module, "make_environment", make)
    monkeypatch.setattr(chat_client, "PAUSE_S", 0.01)
    return opened


class WorkerHere:
    """A `WorkerSlot` whose worker is in this process."""

    name = "worker 0"

    def __init__(self, config, server, max_retries):
        endpoint = EndpointConfig(url=server.url, model=MODEL, max_retries=max_retries)
        sections = (config.rollout.model_dump(), EnvConfig().model_dump(), AgentConfig().model_dump())
        access = EndpointAccess(endpoint.model_dump(), Dialect())
        self.worker = EpisodeWorker(access, *sections, "http://127.0.0.1:1")
        self.play, self.abort = self.worker.play, self.worker.abort

    async def policy_dead(self):
        return self.worker.policy.dead


class EnvironmentsHere:
    """An `EnvironmentSlot` that is never lost."""

    is_serving, losses = True, 0

    async def serving(self):
        return None

    def check(self):
        return 0


def make_collector(server, places=3, max_retries=2):
    config = rollout_config(Path("none"), episodes_in_flight=places)
    config = config.model_copy(update={"env": EnvConfig()})
    worker = WorkerHere(config, server, max_retries)
    return Collector(config.rollout, config.env, [], [worker], EnvironmentsHere())


async def collect(server, tasks, samples=2, budget_s=None, seed=1, **limits):
    collector = make_collector(server, **limits)
    tasks = [Task(f"{key}-{i}", TASK.prompt, "desk", "") for i, key in enumerate(tasks)]
    request = CollectRequest(0, tasks, samples, 0.7, "eval", seed, budget_s)
    ended = []
    result = await collector.collect(request, ended.append)
    assert sorted((t.group, t.sample) for t in ended) == [(g, s) for g in range(len(tasks)) for s in range(samples)]
    return result, collector.dead


def most_open(opened):
    return max(env.open_beside for env in opened)


def trajectories(result):
    return [t for g in result.groups for t in g.trajectories]


def test_a_request_has_the_time_that_all_tokens_of_a_turn_may_take(monkeypatch):
    made = []
    monkeypatch.setattr(chat_client, "ChatClient", lambda endpoint, timeout_s, dialect: made.append(timeout_s))
    config = rollout_config(Path("none"), engine={"request_timeout_s": 7.0, "min_tokens_per_s": 4.0})
    WorkerHere(config, NOWHERE, 0)
    assert config.rollout.sampling.max_tokens_per_turn == 32
    assert made == [7.0 + 32 / 4.0]


async def test_every_episode_is_played_once_a_few_at_a_time_with_seeds_of_its_own(opened):
    def speak(number, body):
        assert server.in_flight <= 3
        return ANSWER if body["messages"][-1]["role"] == "tool" else SEARCH

    with serving(ChatServer(speak)) as server:
        result, dead = await collect(server, ["a", "b", "gone"], samples=3)
        first = sorted(body["seed"] for body in server.bodies)
        server.bodies.clear()
        again, _ = await collect(server, ["a", "b", "gone"], samples=3)
    assert [(t.group, t.sample) for t in trajectories(result)] == [(g, s) for g in range(3) for s in range(3)]
    assert {t.outcome for t in trajectories(result)} == {Outcome.COMPLETED} and dead is None
    assert (result.accounting.started, result.accounting.retried) == (12, 3)  # "gone" comes up at once later
    assert len(set(first)) == len(first) == 18 and first == sorted(body["seed"] for body in server.bodies)
    assert {body["temperature"] for body in server.bodies} == {0.7}
    assert most_open(opened) == 3 + EnvConfig().provisioning.lookahead
    assert all(env.closed == 1 for env in opened) and again.accounting == result.accounting


async def test_a_dead_endpoint_ends_the_collection_and_what_was_played_stays(opened):
    with serving(ChatServer(lambda number, body: ANSWER if number < 4 else error(500, "gone"))) as server:
        result, dead = await collect(server, ["a"] * 30)
        assert len(server.bodies) < 30
    played = [t for t in trajectories(result) if t.reward is not None]
    left = [t for t in trajectories(result) if t.reward is None]
    assert len(played) == 4 and len(left) == 56
    assert {t.outcome for t in left} == {Outcome.ABORTED} and dead == "the endpoint does not answer: 500: gone"
    assert {t.reward_reason for t in left[10:]} == {dead}
    assert all(env.closed == 1 for env in opened) and len(opened) < 30


@in_simulated_time
async def test_a_budget_cuts_off_what_is_open_and_is_no_death(opened, monkeypatch):
    answering(monkeypatch, ANSWER, ANSWER, None)
    result, dead = await collect(NOWHERE, ["a"] * 6, budget_s=1.2, places=2)
    outcomes = [t.outcome for t in trajectories(result)]
    assert dead is None and outcomes.count(Outcome.COMPLETED) == 2 and outcomes.count(Outcome.ABORTED) == 10
    assert "budget of 1.2 s" in next(t.reward_reason for t in trajectories(result) if t.reward is None)
    assert all(env.closed == 1 for env in opened)


@in_simulated_time
async def test_what_a_budget_cut_off_does_not_stop_the_next_collection(opened, monkeypatch):
    answering(monkeypatch, None, ANSWER)
    collector = make_collector(NOWHERE)
    request = CollectRequest(0, [Task("a", TASK.prompt, "desk", "")], 2, 0.7, "eval", 1, 0.3)
    first = await collector.collect(replace(request, samples=1))
    second = await collector.collect(replace(request, budget_s=None))
    assert [t.outcome for t in trajectories(first)] == [Outcome.ABORTED]
    assert [t.outcome for t in trajectories(second)] == [Outcome.COMPLETED] * 2


async def test_a_dead_endpoint_is_asked_for_no_further_collection(opened):
    with serving(ChatServer(lambda number, body: error(401, "no such key", code="invalid_api_key"))) as server:
        collector = make_collector(server)
        request = CollectRequest(0, [Task("a", TASK.prompt, "desk", "")], 2, 0.7, "eval", 1)
        await collector.collect(request)
        asked = len(server.bodies)
        again = await collector.collect(request)
        assert len(server.bodies) == asked
    assert {(t.outcome, t.reward_reason) for t in trajectories(again)} == {(Outcome.ABORTED, collector.dead)}
