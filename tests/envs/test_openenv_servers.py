"""Differences of the public OpenEnv collection's servers from OpenEnv's own examples, one small server for each."""

import json
import logging
from functools import partial

import pytest

pytest.importorskip("openenv")

import tool_servers
from collection_servers import http_only_app, quiz_app, sums_app, unlistable_app, walking_app
from tool_servers import Served, environment, guessing_app, serving

from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import EnvBusy, EnvLost, ToolCall
from megatron_fleet.envs.openenv import _warn_of_a_full_server

TASK = Task("k1", "Answer.", "quiz", "scored by the environment", env_variables={"MODE": "strict"})
VERIFY = {"verify": {"mode": "task:env_variables.MODE", "text": "episode:final_answer"}}
SUMS = {"verify_tool": "verify", "final_calls": VERIFY, "reset_kwargs": {"world": "sums"}}
EVALUATE = {"evaluate": {"evaluate": True, "answer": "episode:final_answer"}}
opened = partial(tool_servers.opened, task=TASK)


@pytest.fixture(scope="module")
def urls():
    apps = {
        "quiz": quiz_app(),
        "unlistable": unlistable_app(),
        "sums": sums_app(),
        "walking": walking_app(),
        "http only": http_only_app(),
        "guessing": guessing_app(),
    }
    with serving(apps) as urls:
        yield urls


async def finished(session, answer=None):
    try:
        return await session.verify(answer, [])
    finally:
        await session.close()


async def lost(url, **openenv):
    session = environment(url, **openenv)
    with pytest.raises(EnvLost) as caught:
        await session.reset(TASK)
    assert (await finished(session)).value is None
    return str(caught.value)


@pytest.mark.parametrize("interface", ["auto", "mcp"])
@pytest.mark.parametrize(("answer", "value"), [("12", 1.0), ("13", 0.0)])
async def test_an_action_that_calls_tools_in_a_class_of_its_own(urls, interface, answer, value):
    """Its tools are listed past the steps, which the environment counts, and called by steps, which it pays for."""
    session, shown = await opened(
        urls["quiz"], interface=interface, finish_tool="submit_answer", shown_metadata=["question"]
    )
    (tool,) = shown.tools
    assert tool["function"]["name"] == "look_up"
    assert tool["function"]["parameters"]["required"] == ["word"]
    assert shown.content == 'Answer.\n\n{"question": "How many months?"}'
    assert (await session.step(ToolCall("look_up", {"word": "months"}))).content == "months: 12"
    assert (await finished(session, answer)).value == value


async def test_the_policy_ends_it_itself_and_sees_nothing_of_the_solution(urls):
    session, shown = await opened(urls["quiz"])
    assert [tool["function"]["name"] for tool in shown.tools] == ["look_up", "submit_answer"]
    assert shown.content == "Answer."
    assert (await session.step(ToolCall("look_up", {}))).error is not None
    observed = await session.step(ToolCall("submit_answer", {"answer": "12"}))
    assert (observed.content, observed.done, observed.error) == ("", True, None)
    assert (await finished(session)).value == 1.0


async def test_shown_metadata_that_is_not_there(urls):
    message = await lost(urls["quiz"], shown_metadata=["question", "task"])
    assert "env.openenv.shown_metadata=task" in message
    assert "it has question, solution, history" in message
    message = await lost(urls["walking"], shown_metadata=["question"])
    assert "it has none" in message and "are at" in message


async def test_tools_that_nobody_can_name(urls):
    assert "tools/list: Environment does not support MCP" in await lost(urls["unlistable"])
    session, shown = await opened(urls["unlistable"], interface="action")
    assert [tool["function"]["name"] for tool in shown.tools] == ["TextCall"]
    await session.close()


@pytest.mark.parametrize(
    ("by", "answer", "value"), [(3, "three", 1.0), (3, None, 0.5), (1, "three", 0.5), (1, "one", 0.0)]
)
async def test_a_verifier_that_no_list_names_gets_the_arguments_of_the_configuration(urls, by, answer, value):
    session, shown = await opened(urls["sums"], **SUMS)
    assert [tool["function"]["name"] for tool in shown.tools] == ["add"]
    assert json.loads((await session.step(ToolCall("add", {"by": by}))).content) == {"tool_result": {"total": by}}
    assert (await session.step(ToolCall("subtract", {}))).error.message == "no tool subtract"
    assert (await session.step(ToolCall("verify", {"mode": "strict"}))).error.kind == "tool_not_found"
    assert (await finished(session, answer)).value == value


async def test_a_verifier_that_fails_is_unknown(urls):
    session, _ = await opened(urls["sums"], **SUMS | {"final_calls": {"verify": {"mode": "loose"}}})
    reward = await finished(session, "three")
    assert reward.value is None and "no mode loose" in reward.reason


@pytest.mark.parametrize(
    ("world", "why"),
    [
        ("sms", "no world 'sms'"),
        ("locked", "no key"),
        ("over", "ended the episode before the first action"),
        ("empty", "could not list its tools: its process ended"),
    ],
)
async def test_a_reset_that_failed_without_an_exception(urls, world, why):
    assert why in await lost(urls["sums"], reset_kwargs={"world": world})


async def test_an_action_that_raises_is_an_error_and_no_way_out_of_a_reward(urls):
    session, _ = await opened(urls["walking"], finish_tool="evaluate", final_calls=EVALUATE)
    assert json.loads((await session.step(ToolCall("Walk", {"by": 2}))).content) == {"at": 2}
    error = (await session.step(ToolCall("Walk", {"by": 9}))).error
    assert (error.kind, error.message) == ("execution_error", "a step of 9 is too long")
    assert json.loads((await session.step(ToolCall("Walk", {"by": 1}))).content) == {"at": 3}
    assert (await finished(session, "three")).value == 1.0
    session, _ = await opened(urls["walking"], unfinished_reward=-1)
    await session.step(ToolCall("Walk", {"by": 9}))
    assert (await finished(session)).value == -1


async def test_an_action_that_ends_an_episode_and_raises_is_unknown(urls):
    session, _ = await opened(urls["walking"], finish_tool="evaluate", final_calls=EVALUATE)
    await session.step(ToolCall("Walk", {"by": -1}))
    reward = await finished(session)
    assert reward.value is None and "nothing to evaluate" in reward.reason


async def test_a_server_without_websocket_sessions(urls):
    assert "has only HTTP routes, and no WebSocket at /ws" in await lost(urls["http only"])


async def test_a_full_server_is_named_once(caplog):
    server = Served(guessing_app(places=1))
    _warn_of_a_full_server.cache_clear()
    first, second = environment(server.url), environment(server.url)
    await first.reset(TASK)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(EnvBusy, match="1/1 sessions active"):
                await second.reset(TASK)
    (record,) = [record for record in caplog.records if record.name == "megatron_fleet.envs.openenv"]
    message = record.getMessage()
    assert server.url in message and "MAX_CONCURRENT_ENVS" in message and "rollout.episodes_in_flight" in message
    for session in (first, second):
        await session.close()
    server.stop()
