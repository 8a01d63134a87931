"""Turns of an OpenAI-compatible endpoint: what is read of them, and what later requests say they were."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("openai")

from chat_server import call, check_history

from megatron_fleet.agents.chat_turn import ToolNames, answers, read_turn
from megatron_fleet.agents.history import ChatHistory
from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.parser import MAX_CALLS, ToolResult

NAMES = ToolNames(())

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
functions = st.fixed_dictionaries(
    {}, optional={"name": st.sampled_from(["look", "", None]), "arguments": junk | st.just('{"a": 1}')}
)
entries = junk | st.fixed_dictionaries(
    {}, optional={"id": st.sampled_from(["a", "b", "", None, 3]), "function": functions}
)
messages = st.fixed_dictionaries(
    {"content": junk, "tool_calls": junk | st.lists(entries, max_size=5)},
    optional={"reasoning_content": junk, "refusal": junk},
)


@settings(max_examples=50, deadline=None)
@given(messages, st.booleans())
def test_any_message_is_read_and_can_be_said_again(message, return_reasoning):
    turn = read_turn(message, 3, return_reasoning, NAMES)
    json.dumps(turn.message)
    known = [c["id"] for c in turn.message.get("tool_calls", ())]
    assert sorted(known) == sorted([*turn.parsed.call_ids, *turn.error_ids]) and len(set(known)) == len(known)
    assert len(turn.parsed.errors) == len(turn.error_ids)
    results = [
        ToolResult(c.name, "r", i, n)
        for i, (c, n) in enumerate(zip(turn.parsed.tool_calls, turn.parsed.call_ids, strict=True))
    ]
    results += [ToolResult("", error, 9) for error in turn.parsed.errors]
    history = ChatHistory("s", "u", (), "")
    history.add([turn.message, *(answers(turn, results, "") if results else [])])
    check_history(history.messages())
    assert turn.parsed.final_answer is None or not known


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": ', "the JSON is malformed"),
        ("[1]", '"arguments" must be a JSON object'),
        ('{"a": 1} x', "there is text behind the JSON object"),
        ('{"a": 1, "a": 2}', "a key appears twice"),
        ('{"a": NaN}', "NaN is not JSON"),
    ],
)
def test_malformed_arguments_are_an_error_that_the_model_reads_under_the_calls_id(arguments, told):
    turn = read_turn({"tool_calls": [call("look", '{"q": 1}', "x"), call("look", arguments, "y")]}, 0, False, NAMES)
    assert turn.parsed.tool_calls == (ToolCall("look", {"q": 1}),) and turn.parsed.call_ids == ("x",)
    assert told in turn.parsed.errors[0] and turn.error_ids == ("y",)
    said = [c["function"]["arguments"] for c in turn.message["tool_calls"]]
    assert [json.loads(s) for s in said] == [{"q": 1}, {"unreadable": arguments}]
    shown = answers(turn, [ToolResult("look", "seen", 0, "x"), ToolResult("", turn.parsed.errors[0], 1)], "note")
    assert [(m["tool_call_id"], m["content"]) for m in shown] == [
        ("x", "seen"),
        ("y", turn.parsed.errors[0] + "\nnote"),
    ]


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_tool_without_parameters_is_called_without_arguments(arguments):
    entry = {"id": "x", "function": {"name": " look ", "arguments": arguments}}
    assert read_turn({"tool_calls": [entry]}, 0, False, NAMES).parsed.tool_calls == (ToolCall("look", {}),)


def test_names_that_an_endpoint_forbids_are_replaced_and_found_again():
    written = ["crm.search", "crm_search", "look", "größe", "x" * 70, "x" * 69 + "y", "", "a b", "a:b"]
    names = ToolNames([{"type": "function", "function": {"name": n, "description": "D"}} for n in written])
    sent = [tool["function"]["name"] for tool in names.tools]
    assert len(set(sent)) == len(written) and all(re.fullmatch("[a-zA-Z0-9_-]{1,64}", name) for name in sent)
    assert [names.original(name) for name in sent] == written
    assert sent[1:4] == ["crm_search", "look", "gr__e"]
    assert {tool["function"]["description"] for tool in names.tools} == {"D"}
    assert ToolNames(names.tools).tools == names.tools
    turn = read_turn({"tool_calls": [call(sent[0], {}, "1"), call("crm.search", {}, "2")]}, 0, False, names)
    assert turn.parsed.tool_calls == (ToolCall("crm.search", {}),) * 2 and sent[0] not in turn.text
    assert [c["function"]["name"] for c in turn.message["tool_calls"]] == [sent[0], "crm_search"]


def test_calls_beyond_the_limit_are_answered_but_not_made():
    turn = read_turn({"tool_calls": [call("look", {}, f"n{i}") for i in range(MAX_CALLS + 2)]}, 0, False, NAMES)
    assert len(turn.parsed.tool_calls) == MAX_CALLS and turn.error_ids == (f"n{MAX_CALLS}", f"n{MAX_CALLS + 1}")


def test_missing_and_repeated_ids_are_replaced():
    turn = read_turn({"tool_calls": [call("a", {}, "x"), call("b", {}, "x"), call("c", {}, "")]}, 4, False, NAMES)
    assert turn.parsed.call_ids == ("x", "call_4_1", "call_4_2")


@pytest.mark.parametrize(
    ("content", "final"),
    [
        ("It is 42. <done>", "It is 42."),
        ("<think>say <done>?</think>no", None),
        ("I said <done></think>42 <done>", "42"),
        ("42", None),
        ([{"type": "text", "text": "42 <done>"}], "42"),
    ],
)
def test_the_final_answer_stands_outside_the_thinking(content, final):
    assert read_turn({"content": content}, 0, False, NAMES).parsed.final_answer == final


def test_a_call_beside_the_final_answer_is_made_first():
    turn = read_turn({"content": "42 <done>", "tool_calls": [call("look", {})]}, 0, False, NAMES)
    assert turn.parsed.final_answer is None and len(turn.parsed.tool_calls) == 1


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_recorded_and_goes_back_only_where_asked_for(field):
    message = {"content": "hi", field: "let me see <done>", "tool_calls": [call("look", {"q": "é"})]}
    for asked in (False, True):
        turn = read_turn(message, 0, asked, NAMES)
        assert turn.parsed.thinking == "let me see <done>"
        assert turn.message.get(field) == ("let me see <done>" if asked else None)
        assert turn.text == (
            "<think>\nlet me see <done>\n</think>\nhi\n"
            '<tool_call>\n{"name": "look", "arguments": {"q": "é"}}\n</tool_call>'
        )


def test_images_follow_the_results_under_their_names():
    turn = read_turn({"tool_calls": [call("shot", {}, "x"), call("look", {}, "y")]}, 0, False, NAMES)
    results = [
        ToolResult("shot", "here: [image 1]", 0, "x", (Image("image/png", b"\x01\x02"),)),
        ToolResult("look", "text", 1, "y"),
    ]
    *tools, user = answers(turn, results, "")
    assert [(m["role"], m["tool_call_id"]) for m in tools] == [("tool", "x"), ("tool", "y")]
    assert tools[0]["content"] == "here: [image 1]"
    assert user == {
        "role": "user",
        "content": [
            {"type": "text", "text": "shot: [image 1]"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AQI="}},
        ],
    }


def test_removed_turns_leave_the_task_and_a_note():
    history = ChatHistory("system", "task", (), "[{turns} removed]")
    for i in range(3):
        history.add([{"role": "assistant", "content": f"a{i}"}, {"role": "user", "content": f"u{i}"}])
    assert not history.changed and history.remove_before(5) == 0
    assert not history.changed and history.remove_before(1) == 2
    assert history.changed and history.remove_before(1) == 0
    assert [m["content"] for m in history.messages()] == ["system", "task\n\n[2 removed]", "a2", "u2"]
