"""Questions with a Python reward: the answer reaches the function in a worker's shape, and never the policy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
import sys

import pytest
from agent_doubles import CALL, SETTINGS, ScriptedEngine, Turn

from megatron_fleet.agents.token_conversation import run_episode
from megatron_fleet.agents.trajectory import Outcome
from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import EnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.fleet import _fleet_task
from megatron_fleet.envs.openenv_tools import final_arguments, reset_arguments
from megatron_fleet.envs.python import check_reward
from megatron_fleet.envs.registry import ServerStart, make_environment, serve
from megatron_fleet.preflight.own_parts import check_own_part

SECRET = "forty-two thousand"
TASK = Task("q1", "How many?", "questions", env_variables={"UNIT": "apples"}, answer=SECRET)
REWARDS = """
import asyncio, time
def score(text, task):
    return 1.0 if text == task.answer else 0.25
async def later(text, task):
    await asyncio.sleep(0)
    return len(text)
def unknown(text, task): return None
def broken(text, task): return task.answer["number"]
def word(text, task): return "good"
def nothing(): return 1.0
def late(text, task): time.sleep(5)
"""


@pytest.fixture
def env(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_a_test.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name, **keys: EnvConfig(kind="python", reward=f"rewards_of_a_test:{name}", **keys)


async def verify(config: EnvConfig, final_answer: str | None, *turns: str):
    environment = make_environment(config, "")
    assert (await environment.reset(pickle.loads(pickle.dumps(TASK)))).content == TASK.prompt
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for turn in turns:
        said += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "Error"}]
    return await environment.verify(final_answer, said)


async def test_the_reward_is_what_the_function_returns(env, tmp_path):
    assert serve(ServerStart(env("score"), tmp_path / "log", "python", 0)).url == ""
    assert (await verify(env("score"), SECRET)).value == 1.0
    assert (await verify(env("score"), "7")).value == 0.25
    assert (await verify(env("later"), "four")).value == 4.0


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ((), 0),
        (("one", "three"), len("three")),
        (("<think>\nlong\n</think>\n\n seven \n",), len("seven")),
        (("opened by the template\n</think>\n\nseven",), len("seven")),
        (("<think>\ncut off",), 0),
    ],
)
async def test_without_a_final_answer_the_last_turn_counts_without_its_thinking(env, turns, text):
    assert (await verify(env("later"), None, *turns)).value == text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown", "returned None"),
        ("broken", "raised TypeError: string indices"),
        ("word", "returned a str; it must return a number"),
        ("late", "returned nothing within 0.05 s"),
    ],
)
async def test_a_function_that_fails_gives_no_reward_and_says_why(env, name, reason):
    reward = await verify(env(name, verify_timeout_s=0.05 if name == "late" else 30), "7")
    assert reward.value is None and f"env.reward=rewards_of_a_test:{name} {reason}" in reward.reason


async def test_slow_functions_run_side_by_side(env):
    """In the event loop itself they would stop all episodes of the worker."""
    late = [verify(env("late", verify_timeout_s=0.05), "7") for _ in range(3)]
    assert [reward.value for reward in await asyncio.gather(*late)] == [None] * 3


@pytest.mark.parametrize("turns", [1, 3])
async def test_no_text_that_the_policy_sees_has_the_answer(env, tokenizer, renderer, turns):
    settings = dataclasses.replace(SETTINGS, max_turns=turns)
    script = [Turn("I think."), Turn(CALL), Turn("7 <done>")][-turns:]
    engine, environment = ScriptedEngine(tokenizer, script), make_environment(env("score"), "")
    played = await run_episode(TASK, environment, engine, renderer, settings, None, session="s")
    prompts = [tokenizer.decode(prompt) for prompt in engine.prompts]
    assert len(prompts) == turns and "How many?" in prompts[0] and "UNIT: apples" in prompts[0]
    assert SECRET not in "".join(prompts) and SECRET not in json.dumps(played.messages) and SECRET not in repr(played)
    assert (played.reward, played.outcome) == (0.25, Outcome.COMPLETED)
    assert ("one tool" in "".join(prompts), "with the tools" in prompts[0]) == (False, False)
    assert ("<done>" in prompts[0]) == (turns > 1)
    assert turns == 1 or "there are no tools here" in prompts[-1]


def test_no_server_is_sent_the_answer():
    """A server may show what it is sent."""
    assert SECRET not in json.dumps(reset_arguments(TASK, "episode", {"answer": "task:answer"}))
    assert SECRET not in json.dumps(final_arguments({"answer": "task:answer"}, TASK, None))
    assert SECRET not in json.dumps(_fleet_task(TASK))


@pytest.mark.slow
def test_the_function_is_called_once_before_a_run(env):
    check_reward(env("score"), TASK, sys.executable)
    check_reward(env("unknown"), TASK, sys.executable)
    with pytest.raises(UserError, match=r"env.reward=rewards_of_a_test:broken raised TypeError.*task q1; correct it"):
        check_reward(env("broken"), TASK, sys.executable)


def test_a_function_of_other_arguments_is_refused_before_a_run(env):
    check_own_part("env.reward", "rewards_of_a_test:later")
    with pytest.raises(UserError, match=r"env.reward=rewards_of_a_test:nothing must take \(text: str, task: Task\)"):
        check_own_part("env.reward", "rewards_of_a_test:nothing")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.kind=python"], "env.kind=python needs a function that scores answers; add env.reward="),
        (["env.reward=m:f"], "env.reward=m:f has no effect with env.kind=embedded; add env=python"),
        (["env=python"], "env.reward"),
        (["env=python", "env.reward=score"], 'env.reward="score": it must be package.module:name'),
    ],
)
def test_a_configuration_without_the_function_is_refused(overrides, words):
    pytest.importorskip("hydra")
    with pytest.raises(UserError) as refused:
        validate.check(load(["model=tiny", "data.tasks=t.json", *overrides]))
    assert words in str(refused.value)
