"""What is sent to a server: arguments of reset and of the tool that ends an episode; which failures may pass."""

from typing import get_args

import pytest

from megatron_fleet.config.sections.env import Env
from megatron_fleet.config.sections.openenv import OpenEnv
from megatron_fleet.data.task import Task
from megatron_fleet.envs.busy import is_busy
from megatron_fleet.envs.openenv_tools import action_tool, explain, finish_arguments, openai_tool, reset_arguments
from megatron_fleet.envs.registry import KINDS

TASK = Task("k", "p", "e", "v", data_key="d", env_variables={"SEED": 7, "WHO": {"ID": "u1"}})
SAID = [{"role": "user", "content": "x"}]


def finish(required=(), **types):
    schema = {"properties": {name: {"type": kind} for name, kind in types.items()}, "required": list(required)}
    return openai_tool("finish", None, {"type": "object", **schema})


def test_reset_is_told_the_task_and_what_is_configured():
    extra = {"level": 3, "seed": "task:env_variables.SEED", "who": "task:env_variables.WHO.ID", "of": "task:data_key"}
    config = {"least": 2, "seed": "task:env_variables.SEED", "no": "task:env_variables.NO"}
    extra = OpenEnv(reset_kwargs=extra | {"config": config}).reset_kwargs
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
    assert "'left' is not one of" in explain(action_tool(schema, "move"), {"move": "left"})
    assert action_tool({}, None)["function"]["name"] == "act"
    assert action_tool(schema, "move")["function"]["name"] == "move"


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


def test_every_kind_of_the_configuration_has_its_entry():
    assert set(get_args(Env.model_fields["kind"].annotation)) == set(KINDS)
