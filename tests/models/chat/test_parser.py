import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat import parser
from megatron_fleet.models.chat.parser import MAX_CALLS, ParsedTurn
from megatron_fleet.models.qwen3.chat import HERMES

A = '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
CALL_A = ToolCall("a", {})
PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<done>", '{"name": "a", "arguments": {}}', "```", "\n", "{"]
)


def parse_turn(text: str) -> ParsedTurn:
    return parser.parse_turn(text, HERMES)


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def test_thinking_calls_and_text_are_told_apart():
    turn = parse_turn(f"<think>\nplan\n</think>\n\nLet me look. {A} {A}")
    assert (turn.thinking, turn.content) == ("plan", "Let me look.")
    assert turn.tool_calls == (CALL_A, CALL_A)
    assert turn.errors == () and turn.final_answer is None


@pytest.mark.parametrize(
    "thought",
    [
        f"<think>I could {A} or <done></think>",
        "<think>the text <tool_call> and <done></think>",
        f"continued thinking {A} <done></think>",
        "continued thinking <tool_call> oops </think>",
        f"<think>outer <think>inner</think> still {A} <done></think>",
    ],
)
def test_what_is_quoted_in_thinking_has_no_effect(thought):
    assert parse_turn(thought + "hello").content == "hello"
    assert parse_turn(thought).tool_calls == () and parse_turn(thought).final_answer is None
    real = parse_turn(thought + call('{"name": "real", "arguments": {"x": 1}}'))
    assert real.tool_calls == (ToolCall("real", {"x": 1}),) and real.errors == ()
    assert parse_turn(thought + "42<done>").final_answer == "42"


def test_unclosed_thinking_swallows_the_rest():
    turn = parse_turn(f"<think>never ends {A} 42 <done>")
    assert (turn.content, turn.tool_calls, turn.errors, turn.final_answer) == ("", (), (), None)
    assert turn.thinking.startswith("never ends")


def test_final_answer_is_the_text_before_the_done_that_ends_the_turn():
    assert parse_turn("<think>x</think>The answer\nis 42. <done>\n").final_answer == "The answer\nis 42."
    assert parse_turn("I end with <done>: 42 <done> <done>").final_answer == "I end with <done>: 42"
    assert parse_turn("<done>").final_answer == ""
    assert parse_turn("42").final_answer is None
    assert parse_turn("42" + "<done>" * 100_000).final_answer == "42"


@pytest.mark.parametrize(
    "text",
    ["I am to write <done> when finished. I search first.", "The end is `<done>`", "42 <done>.", "42 <done> bye"],
)
def test_done_within_the_text_is_text(text):
    turn = parse_turn(text)
    assert turn.final_answer is None and turn.content == text


@pytest.mark.parametrize(
    "text", [f"{A} 42 <done>", f"42 <done> {A}", f"42 <done> {call('{')}", f"{call('[]')} 42 <done>"]
)
def test_done_beside_a_tried_call_does_not_count(text):
    assert parse_turn(text).final_answer is None
    assert parse_turn(text).tool_calls or parse_turn(text).errors


def test_tags_inside_the_json_of_a_call_are_data():
    body = '{"name": "write", "arguments": {"text": "</tool_call> <think> <done> <tool_call>"}}'
    turn = parse_turn(call(body))
    assert turn.tool_calls == (ToolCall("write", {"text": "</tool_call> <think> <done> <tool_call>"}),)
    assert (turn.content, turn.thinking, turn.errors, turn.final_answer) == ("", "", (), None)


@pytest.mark.parametrize(
    "body",
    [
        '\n```json\n{"name": "a", "arguments": {}}\n```\n',
        '```{"name": "a", "arguments": {}}```',
        '{"name": " a ", "arguments": "{}"}',
        '{"name": "a", "arguments": null}',
        '{"name": "a", "arguments": " "}',
    ],
)
def test_code_fences_arguments_as_a_json_string_and_none_are_read(body):
    assert parse_turn(call(body)).tool_calls == (CALL_A,)


def test_a_call_whose_closing_tag_is_missing_at_the_end_is_read():
    assert parse_turn(A.removesuffix("</tool_call>")).tool_calls == (CALL_A,)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "malformed"),
        ('{"name": "a", "arguments": {"q": oops}}', "malformed (Expecting value)"),
        ("[1]", "must be an object"),
        ('{"arguments": {}}', '"name" is missing'),
        ('{"name": "", "arguments": {}}', '"name" is missing'),
        ('{"name": 3, "arguments": {}}', '"name" is missing'),
        ('{"name": "a"}', '"arguments" is missing'),
        ('{"name": "a", "parameters": {"x": 1}}', '"arguments" is missing'),
        ('{"name": "a", "arguments": [1]}', "must be a JSON object"),
        ('{"name": "a", "arguments": "x"}', "malformed"),
        ('{"name": "a", "arguments": {"x": 1, "x": 2}}', "appears twice"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "too large"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "too large"),
        ('{"name": "a", "arguments": {"x": ' + "[" * 100_000, "too deeply"),
        ('{"name": "a", "arguments": {"x": ["\\ud800"]}}', "surrogate"),
        ('{"name": "a", "arguments": {}} and more', "text between"),
    ],
)
def test_a_call_that_cannot_be_read_says_why_and_the_next_one_counts(body, sentence):
    turn = parse_turn(call(body) + A)
    assert len(turn.errors) == 1 and sentence in turn.errors[0] and turn.errors[0].startswith("Invalid tool call: ")
    assert turn.tool_calls == (CALL_A,)


@pytest.mark.parametrize("depth", [*range(900, 1010), 101, 5_000])
def test_no_depth_of_arguments_ends_the_episode(depth):
    """Just below the interpreter's limit reading succeeds and whatever writes the value again fails."""
    nested = "[" * depth + "]" * depth
    turn = parse_turn(call('{"name": "a", "arguments": {"x": ' + nested + "}}") + A)
    assert turn.tool_calls == (CALL_A,) and "too deeply" in turn.errors[0]


def test_a_large_integer_that_python_can_hold_is_kept():
    number = 10**400
    assert parse_turn(call(f'{{"name": "a", "arguments": {{"n": {number}}}}}')).tool_calls[0].arguments == {"n": number}


def test_nested_call_tags_give_an_error_and_the_inner_call():
    turn = parse_turn(f"<tool_call>{A}</tool_call>")
    assert turn.tool_calls == (CALL_A,) and len(turn.errors) == 1


def test_a_flood_of_calls_is_cut_short_and_may_still_turn_out_to_be_thinking():
    turn = parse_turn(A * 10_000)
    assert len(turn.tool_calls) == MAX_CALLS and len(turn.errors) == 1
    assert parse_turn(A * 10_000 + "</think>42<done>").final_answer == "42"


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES | st.text(max_size=8)).map("".join))
@example("<tool_call>" * 5000)
def test_any_text_gives_a_turn(text):
    turn = parse_turn(text)
    assert turn.final_answer is None or not (turn.tool_calls or turn.errors)
    for tool_call in turn.tool_calls:
        assert isinstance(tool_call.arguments, dict) and tool_call.name
        json.dumps(tool_call.arguments, allow_nan=False).encode()


@pytest.mark.slow  # imports vLLM
def test_well_formed_calls_agree_with_vllms_hermes_parser(tokenizer_folder):
    pytest.importorskip("vllm")
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    tools = [{"type": "function", "function": {"name": n, "parameters": {}}} for n in "abc"]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=tools, model="m")
    oracle = ToolParserManager.get_tool_parser("hermes")(AutoTokenizer.from_pretrained(tokenizer_folder), request.tools)
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda s: "<" not in s)
    values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    calls = st.lists(
        st.tuples(st.sampled_from("abc"), st.dictionaries(text, values, max_size=3)), min_size=1, max_size=3
    )

    @settings(max_examples=200, deadline=None)
    @given(text.map(str.strip), calls)
    def check(content, calls):
        bodies = [json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls]
        turn = content + "\n".join(f"<tool_call>\n{b}\n</tool_call>" for b in bodies)
        theirs = oracle.extract_tool_calls(turn, request)
        ours = parse_turn(turn)
        assert [(c.function.name, json.loads(c.function.arguments)) for c in theirs.tool_calls] == [
            (c.name, c.arguments) for c in ours.tool_calls
        ]
        assert (theirs.content or "") == ours.content == content

    check()
