"""ChatWorker: whole collections against a real HTTP endpoint, with scripted environments."""

from dataclasses import replace

import pytest

pytest.importorskip("openai")

from agent_doubles import TASK, TOOLS, ScriptedEnvironment
from chat_doubles import answering
from chat_server import MODEL, ChatServer, call, error, serving
from waiting import in_simulated_time

from megatron_fleet.agents import chat_client
from megatron_fleet.agents.chat_client import Dialect
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config.schema import AgentConfig, EnvConfig, RolloutConfig, SamplingConfig
from megatron_fleet.config.sections.evaluation import EndpointConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvLost, Observation
from megatron_fleet.rollout import worker as worker_module
from megatron_fleet.rollout.chat_messages import Setup
from megatron_fleet.rollout.chat_worker import ChatWorker
from megatron_fleet.rollout.requests import CollectRequest

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


def make_worker(server, places=3, max_retries=2):
    rollout = RolloutConfig(
        prompts_per_step=1,
        samples_per_prompt=2,
        max_context=4000,
        workers=2,
        episodes_in_flight=places,
        sampling=SamplingConfig(max_tokens_per_turn=50, max_turns=4),
    )
    endpoint = EndpointConfig(url=server.url, model=MODEL, max_retries=max_retries)
    sections = (rollout.model_dump(), EnvConfig().model_dump(), AgentConfig().model_dump(), endpoint.model_dump())
    return ChatWorker(Setup(*sections, Dialect(), "http://127.0.0.1:1"))


async def collect(server, tasks, samples=2, budget_s=None, seed=1, **limits):
    worker, reports = make_worker(server, **limits), []
    tasks = [Task(f"{key}-{i}", TASK.prompt, "desk", "") for i, key in enumerate(tasks)]
    try:
        request = CollectRequest(0, tasks, samples, 0.7, "eval", seed, budget_s)
        ended = await worker.collect(request, reports.append)
    finally:
        await worker.close()
    return ended, reports


def most_open(opened):
    return max(env.open_beside for env in opened)


def trajectories(ended):
    return [t for g in ended.result.groups for t in g.trajectories]


async def test_every_episode_is_played_once_a_few_at_a_time_with_seeds_of_its_own(opened):
    def speak(number, body):
        assert server.in_flight <= 3
        return ANSWER if body["messages"][-1]["role"] == "tool" else SEARCH

    with serving(ChatServer(speak)) as server:
        ended, _ = await collect(server, ["a", "b", "gone"], samples=3)
        first = sorted(body["seed"] for body in server.bodies)
        server.bodies.clear()
        again, _ = await collect(server, ["a", "b", "gone"], samples=3)
    assert [(t.group, t.sample) for t in trajectories(ended)] == [(g, s) for g in range(3) for s in range(3)]
    assert {t.outcome for t in trajectories(ended)} == {Outcome.COMPLETED} and ended.dead is None
    assert (ended.result.accounting.started, ended.result.accounting.retried) == (
        12,
        3,
    )  # "gone" comes up at once later
    assert len(set(first)) == len(first) == 18 and first == sorted(body["seed"] for body in server.bodies)
    assert {body["temperature"] for body in server.bodies} == {0.7}
    assert most_open(opened) == 3 + EnvConfig().provisioning.lookahead
    assert all(env.closed == 1 for env in opened) and again.result.accounting == ended.result.accounting


async def test_a_dead_endpoint_ends_the_collection_and_what_was_played_stays(opened):
    with serving(ChatServer(lambda number, body: ANSWER if number < 4 else error(500, "gone"))) as server:
        ended, _ = await collect(server, ["a"] * 30)
        assert len(server.bodies) < 30
    played = [t for t in trajectories(ended) if t.reward is not None]
    left = [t for t in trajectories(ended) if t.reward is None]
    assert len(played) == 4 and len(left) == 56
    assert {t.outcome for t in left} == {Outcome.ABORTED} and ended.dead == "the endpoint does not answer: 500: gone"
    assert {t.reward_reason for t in left[10:]} == {ended.dead}
    assert all(env.closed == 1 for env in opened) and len(opened) < 30


@in_simulated_time
async def test_a_budget_cuts_off_what_is_open_and_is_no_death(opened, monkeypatch):
    answering(monkeypatch, ANSWER, ANSWER, None)
    ended, reports = await collect(NOWHERE, ["a"] * 6, budget_s=1.2, places=2)
    outcomes = [t.outcome for t in trajectories(ended)]
    assert ended.dead is None and outcomes.count(Outcome.COMPLETED) == 2 and outcomes.count(Outcome.ABORTED) == 10
    assert "budget of 1.2 s" in next(t.reward_reason for t in trajectories(ended) if t.reward is None)
    assert len(reports) == 2 and sum(len(report.ended) for report in reports) == 2
    assert reports[-1].progress.total == 12 and all(env.closed == 1 for env in opened)


@in_simulated_time
async def test_what_a_budget_cut_off_does_not_stop_the_next_collection(opened, monkeypatch):
    answering(monkeypatch, None, ANSWER)
    worker = make_worker(NOWHERE)
    request = CollectRequest(0, [Task("a", TASK.prompt, "desk", "")], 2, 0.7, "eval", 1, 0.3)
    first = await worker.collect(replace(request, samples=1), lambda report: None)
    second = await worker.collect(replace(request, budget_s=None), lambda report: None)
    await worker.close()
    assert [t.outcome for t in trajectories(first)] == [Outcome.ABORTED]
    assert [t.outcome for t in trajectories(second)] == [Outcome.COMPLETED] * 2
