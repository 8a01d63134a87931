"""Any OpenEnv server by its address: tools the Model Context Protocol's way, one action, and every way to a reward."""

import asyncio
import json
from functools import partial

import pytest

pytest.importorskip("openenv")

import tool_servers
from tool_servers import PIXELS, counter_app, environment, fast_counter_app, guessing_app, serving, template_app

from megatron_fleet.config.sections.env import EnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, EnvLost, EnvRefused, Image, ToolCall
from megatron_fleet.envs.registry import make_environment

TASK = Task("k1", "Reach three.", "sums", "scored by the environment", data_key="hard", env_variables={"GOAL": 3})
ADD = ToolCall("add", {"by": 3})
opened = partial(tool_servers.opened, task=TASK)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    apps = {"counter": counter_app(), "fast": fast_counter_app(), "guessing": guessing_app()}
    apps["template"] = template_app(tmp_path_factory.mktemp("template"))
    with serving(apps) as urls:
        yield urls


def names(shown):
    return [tool["function"]["name"] for tool in shown.tools]


async def finished(session, answer="three"):
    try:
        return await session.verify(answer, [{"role": "user", "content": "x"}])
    finally:
        await session.close()


async def test_tools_and_arguments_of_reset(urls):
    kwargs = {"goal": "task:env_variables.GOAL", "level": "task:data_key", "seed": "task:env_variables.SEED"}
    session, shown = await opened(urls["counter"], finish_tool="submit", verify_tool="verify", reset_kwargs=kwargs)
    assert names(shown) == ["add", "asked", "look", "fail", "done"]
    assert shown.content == TASK.prompt  # the metadata of the reset, where the solution is, are not for the policy
    seen = json.loads((await session.step(ToolCall("asked", {}))).content)
    assert (seen["asked"], seen["goal"]) == ("hard/sums", 3)
    for hidden in ("submit", "verify"):
        assert (await session.step(ToolCall(hidden, {"text": "three"}))).error.kind == "tool_not_found"
    assert (await session.step(ToolCall("fail", {}))).error.message == "no ink"
    await session.close()


async def test_an_image_has_a_place_in_the_text(urls):
    session, _ = await opened(urls["counter"])
    shown = await session.step(ToolCall("look", {}))
    assert (shown.content, shown.images) == ("here:\n[image 1]", (Image("image/webp", PIXELS),))
    await session.close()


@pytest.mark.parametrize(
    ("openenv", "calls", "answer", "value"),
    [
        ({"finish_tool": "submit"}, [ADD], "three", 1.0),
        ({"finish_tool": "submit"}, [ADD], "four", 0.0),
        ({"finish_tool": "submit"}, [ADD], None, 0.0),
        ({"finish_tool": "done"}, [ADD], "three", None),
        ({"finish_tool": "done", "verify_tool": "verify"}, [ADD], "three", 0.5),
        ({"verify_tool": "verify"}, [ADD], "three", 0.5),
        ({"verify_tool": "verify"}, [ADD, ADD], "three", 0.0),
        ({}, [ADD], "three", 0.0),
        ({"unfinished_reward": -1}, [ADD], "three", -1.0),
        ({"unfinished_reward": None}, [ADD], "three", None),
        ({"reward": "sum", "unfinished_reward": -1}, [], None, -1.0),
        ({"reward": "last", "verify_tool": "verify"}, [], None, 0.0),
        ({}, [ADD, ToolCall("submit", {"text": "three"})], None, 1.0),
        ({"finish_tool": "done"}, [ADD, ToolCall("submit", {"text": "three"})], None, 1.0),
        ({"reward": "sum"}, [ADD, ADD], None, 0.5),
        ({"reward": "last"}, [ADD, ADD], None, 0.25),
        ({"reward": "sum", "finish_tool": "submit"}, [ADD], "three", 1.25),
        ({"reward": "last", "finish_tool": "submit"}, [ADD], "three", 1.0),
        ({"reward": "sum"}, [ToolCall("asked", {})], None, None),
        ({}, [ToolCall("add", {"by": 101})], None, 0.25),
    ],
)
async def test_the_reward_is_what_the_environment_told(urls, openenv, calls, answer, value):
    session, _ = await opened(urls["counter"], **openenv)
    for call in calls:
        shown = await session.step(call)
    if calls:
        assert shown.done == (calls[-1].name == "submit" or calls[-1].arguments.get("by") == 101)
    reward = await session.verify(answer, [])
    again = await finished(session, "another")
    assert (reward.value, again) == (value, reward)
    assert reward.reason or value is not None


@pytest.mark.parametrize("key", ["finish_tool", "verify_tool"])
async def test_a_misspelt_tool_is_found_at_the_first_reset(urls, key):
    session = environment(urls["counter"], **{key: "submitt"})
    with pytest.raises(
        EnvRefused, match=rf"env\.openenv\.{key}=submitt: no such tool; the environment has add, .*submit"
    ):
        await session.reset(TASK)
    await session.close()


async def test_a_server_that_asks_for_patience_is_busy(urls):
    session = environment(urls["counter"])
    with pytest.raises(EnvBusy, match="no_seat"):
        await session.reset(Task("k", "p", "full", "v"))
    assert names(await session.reset(TASK))
    await session.close()


async def test_fastmcp_results(urls):
    session, shown = await opened(urls["fast"], interface="mcp")
    assert set(names(shown)) == {"add", "words", "nothing", "look", "fail"}
    seen = {name: await session.step(ToolCall(name, {})) for name in ("words", "nothing", "look", "fail")}
    assert (await session.step(ADD)).content == '{"total": 3}'
    assert seen["words"].content == '["a", "é"]'
    assert seen["nothing"].error is None
    assert (seen["look"].content, seen["look"].images) == ("[image 1]", (Image("image/png", PIXELS),))
    assert "no ink" in seen["fail"].error.message
    assert (await session.step(ToolCall("add", {"by": "much"}))).error is not None
    assert (await session.step(ToolCall("unheard_of", {}))).error.kind == "tool_not_found"
    assert (await session.step(ToolCall("add", {"by": 1}))).content == '{"total": 4}'
    assert (await finished(session)).value == 0.0


async def test_an_action_is_the_one_tool(urls):
    session, shown = await opened(urls["guessing"])
    (tool,) = shown.tools
    assert tool["function"]["name"] == "Guess" and tool["function"]["description"] == "Guess the number."
    assert list(tool["function"]["parameters"]["properties"]) == ["guess"]
    assert tool["function"]["parameters"]["required"] == ["guess"]
    assert shown.content == 'Reach three.\n\n{"hint": "between 1 and 9"}'
    observed = await session.step(ToolCall("Guess", {"guess": 3}))
    assert (observed.content, observed.done) == ('{"hint": "no"}', False)
    refused = {"guess: 'a lot' is not": {"guess": "a lot"}, "'guess' is a required": {}}
    refused["'x' was unexpected"] = {"guess": 1, "x": 2}
    for message, arguments in refused.items():
        error = (await session.step(ToolCall("Guess", arguments))).error
        assert error.kind == "invalid_args" and message in error.message
    assert (await session.step(ToolCall("guess", {"guess": 1}))).error.kind == "tool_not_found"
    assert (await session.step(ToolCall("Guess", {"guess": 7}))).done
    assert (await finished(session)).value == 1.0


@pytest.mark.parametrize(("reward", "value"), [("finish", 0.0), ("last", 0.1), ("sum", 0.2)])
async def test_an_action_environment_that_was_not_ended(urls, reward, value):
    session, shown = await opened(urls["guessing"], interface="action", action_tool="try_it", reward=reward)
    assert names(shown) == ["try_it"]
    for guess in (1, 2):
        await session.step(ToolCall("try_it", {"guess": guess}))
    assert (await finished(session)).value == value


async def test_an_environment_of_openenvs_own_hand(urls):
    """Server that ``openenv init`` writes: no line of it, or about it, is in this package."""
    session, shown = await opened(urls["template"], reward="last")
    assert names(shown) == ["FirstAction"]
    assert shown.tools[0]["function"]["parameters"]["properties"]["message"]["type"] == "string"
    assert "environment ready!" in shown.content
    other = environment(urls["template"])
    await other._client.connect()
    await asyncio.sleep(0.2)  # the refusal, and the end of the socket, are there before anything is asked
    for _ in range(2):
        with pytest.raises(EnvBusy):  # it has one place
            await other.reset(TASK)
    observed = await session.step(ToolCall("FirstAction", {"message": "hello"}))
    assert observed.content == '{"echoed_message": "hello", "message_length": 5}'
    assert (await finished(session)).value == 0.5
    await other.close()


@pytest.mark.parametrize(("answer", "value"), [("a", 0.1), ("four", 0.4), (None, 0.0)])
async def test_the_final_answer_is_the_one_action(urls, answer, value):
    """A server that asks and scores: what the policy answers is what it does, and it has nothing else to call."""
    session, shown = await opened(urls["template"], finish_tool="FirstAction")
    assert shown.tools == ()
    assert (await session.step(ToolCall("FirstAction", {"message": "x"}))).error.kind == "tool_not_found"
    assert (await finished(session, answer)).value == pytest.approx(value)


async def test_a_server_without_a_tool_is_lost(urls):
    session = environment(urls["guessing"], verify_tool="Guess")
    with pytest.raises(EnvLost, match="no tools"):
        await session.reset(TASK)
    assert (await finished(session)).value is None


async def test_asked_for_tools_that_it_does_not_have(urls):
    session = environment(urls["guessing"], interface="mcp")
    with pytest.raises(EnvRefused, match="VALIDATION_ERROR"):
        await session.reset(TASK)
    await session.close()


async def test_an_episode_has_the_name_that_it_was_given(urls):
    seen = []
    for name in ("7/3", None, None):
        session = make_environment(EnvConfig(kind="openenv", url=urls["counter"]), urls["counter"], name)
        await session.reset(TASK)
        seen.append(json.loads((await session.step(ToolCall("asked", {}))).content)["id"])
        await session.close()
    assert seen[0] == "7/3" and len(set(seen)) == 3 and all(seen)


async def test_a_reply_without_an_observation_loses_the_session(urls):
    session, _ = await opened(urls["counter"], finish_tool="submit")
    step = session._client.step

    async def broken(action):
        reply = await step(action)
        reply.observation = "502 Bad Gateway"
        return reply

    session._client.step = broken
    with pytest.raises(EnvLost, match="502 Bad Gateway"):
        await session.step(ADD)
    assert (await finished(session)).value is None


async def test_many_sessions_do_not_mix(urls):
    async def one(goal):
        session, _ = await opened(urls["counter"], finish_tool="submit", reset_kwargs={"goal": goal})
        for _ in range(goal):
            await session.step(ToolCall("add", {"by": 1}))
        return (await finished(session)).value

    assert await asyncio.gather(*map(one, range(1, 9))) == [1.0] * 8
