"""Requests to a server: arguments of reset and of the tool that ends an episode; which failures may pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fleet.config.sections.env import OpenEnvConfig
from megatron_fleet.data.task import Task
from megatron_fleet.envs.base import is_busy
from megatron_fleet.envs.openenv_tools import (
    action_tool,
    calls_tools,
    final_arguments,
    finish_arguments,
    openai_tool,
    reset_arguments,
)

TASK = Task("k", "p", "e", "v", data_key="d", env_variables={"SEED": 7, "WHO": {"ID": "u1"}})
SAID = [{"role": "user", "content": "x"}]


def finish(required=(), **types):
    schema = {"properties": {name: {"type": kind} for name, kind in types.items()}, "required": list(required)}
    return openai_tool("finish", None, {"type": "object", **schema})


def test_reset_is_told_the_task_and_what_is_configured():
    extra = {"level": 3, "seed": "task:env_variables.SEED", "who": "task:env_variables.WHO.ID", "of": "task:data_key"}
    config = {"least": 2, "seed": "task:env_variables.SEED", "no": "task:env_variables.NO"}
    extra = OpenEnvConfig(reset_kwargs=extra | {"config": config}).reset_kwargs
    sent = reset_arguments(TASK, "e1", extra | {"none": "task:data_version", "no": "task:env_variables.NO.NO"})
    assert {name: sent[name] for name in extra} == {
        "level": 3,
        "seed": 7,
        "who": "u1",
        "of": "d",
        "config": {"least": 2, "seed": 7},
    }
    assert "none" not in sent and "no" not in sent
    assert (sent["episode_id"], sent["task_key"], sent["env_variables"]) == ("e1", "k", TASK.env_variables)


@given(st.none() | st.text() | st.sampled_from(["task:env_key", "episode:final_answer"]))
def test_arguments_of_the_last_call_by_their_references(answer):
    """A policy's text that is spelled like a reference is sent as text."""
    config = {"mode": "strict", "sure": True, "seed": "task:env_variables.SEED", "text": "episode:final_answer"}
    sent = {"mode": "strict", "sure": True, "seed": 7} | ({} if answer is None else {"text": answer})
    assert final_arguments(config, TASK, answer) == sent
    assert final_arguments({"note": "see: below"}, TASK, answer) == {"note": "see: below"}


@pytest.mark.parametrize(
    ("tool", "answer", "sent"),
    [
        (None, "42", {"answer": "42"}),
        (None, None, {"answer": None}),
        (finish(answer="string", note="string"), "42", {"answer": "42"}),
        (finish(answer="number"), "42", {"answer": "42"}),
        (finish(text="string", sure="boolean"), "42", {"text": "42"}),
        (finish(("text",), text="string"), None, {"text": ""}),
        (finish(text="string"), None, {}),
        (finish(a="string", b="string"), "42", {}),
        (finish(), "42", {}),
        (finish(answer="string", conversation="array"), "42", {"answer": "42", "conversation": SAID}),
        (finish(conversation="string"), "42", {"conversation": SAID}),
    ],
)
def test_the_last_tool_gets_the_answer_where_it_has_a_place(tool, answer, sent):
    assert finish_arguments(tool, answer, SAID, "def verify(env): ...") == sent


def test_fleets_last_tool_gets_the_conversation_when_the_verifier_speaks_of_it():
    code = "def verify(env, conversation): ..."
    assert finish_arguments(None, "42", SAID, code) == {"answer": "42", "conversation": SAID}


def test_an_action_becomes_a_tool():
    schema = {
        "title": "My Action!", "type": "object", "description": "Play.", "required": ["move"],
        "properties": {"metadata": {"type": "object"}, "move": {"$ref": "#/$defs/Move"}},
        "$defs": {"Move": {"enum": ["up", "down"]}},
    }  # fmt: skip
    function = action_tool(schema, None)["function"]
    assert (function["name"], function["description"]) == ("My_Action", "Play.")
    assert list(function["parameters"]["properties"]) == ["move"]
    assert function["parameters"]["$defs"] == schema["$defs"]
    assert action_tool({}, None)["function"]["name"] == "act"
    assert action_tool(schema, "move")["function"]["name"] == "move"


@pytest.mark.parametrize(
    ("properties", "calls"),
    [
        ({"type": {"const": "call_tool", "default": "call_tool"}, "tool_name": {"type": "string"}}, True),
        ({"type": {"default": "call_tool"}, "tool_name": {"type": "string"}}, True),
        ({"type": {"const": "call_tool"}}, False),
        ({"type": {"type": "string"}, "tool_name": {"type": "string"}}, False),
        ({"action_type": {"enum": ["ListTools", "CallTool"]}, "tool_name": {"type": "string"}}, False),
        ({}, False),
    ],
)
def test_which_actions_call_tools(properties, calls):
    assert calls_tools({"title": "Any", "properties": properties}) is calls
    assert not calls_tools({})


class FleetInstanceLimitError(Exception):
    pass


def test_only_what_passes_is_busy():
    for busy in (
        RuntimeError("Server error: full (code: CAPACITY_REACHED)"),
        FleetInstanceLimitError("403"),
        RuntimeError("Too many in-flight instance creations"),
        RuntimeError('{"code": "x", "retryable": true}'),
        ExceptionGroup("several", [ValueError("x"), RuntimeError("Rate limit exceeded")]),
    ):
        assert is_busy(busy)
        wrapped = RuntimeError("could not start")
        wrapped.__cause__ = busy
        assert is_busy(wrapped)
    for hopeless in (
        RuntimeError("no such environment"),
        RuntimeError('{"retryable": false}'),
        ConnectionError("refused"),
    ):
        assert not is_busy(hopeless)
