"""The tool calls of GLM, Kimi and Qwen3.5: what is read, what is refused and why, and that any text gives a turn."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.parser import MAX_CALLS, parse_turn
from megatron_fleet.models.glm4.chat import GLM
from megatron_fleet.models.kimi.chat import KIMI
from megatron_fleet.models.qwen3.chat import HERMES
from megatron_fleet.models.qwen3_5.chat import QWEN3_5

PLAIN = {"q": "open"}


def glm(name="f", *pairs, close="</tool_call>"):
    return (
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in pairs)
        + close
    )


def kimi(body='{"q": "open"}', call_id="functions.f:0", close="<|tool_call_end|>"):
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{body}{close}"


def qwen(name="f", *pairs, close="</function>\n</tool_call>"):
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
    return f"<tool_call>\n<function={name}>\n{parameters}{close}"


def section(*calls):
    return "<|tool_calls_section_begin|>" + "".join(calls) + "<|tool_calls_section_end|>"


def tools(**kinds):
    properties = {name: kind if isinstance(kind, dict) else {"type": kind} for name, kind in kinds.items()}
    return [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]


A_CALL = {"glm": glm("f", ("q", "open")), "kimi": section(kimi()), "qwen": qwen("f", ("q", "open"))}
SYNTAX = {"glm": GLM, "kimi": KIMI, "qwen": QWEN3_5}


@pytest.fixture(params=list(SYNTAX))
def family(request):
    """(its syntax, a good call)"""
    return SYNTAX[request.param], A_CALL[request.param]


def test_calls_text_and_thinking_are_told_apart(family):
    syntax, call = family
    turn = parse_turn(f"\n<think>plan</think>\nLet me look. {call}\n{call}", syntax)
    assert (turn.thinking, turn.content) == ("plan", "Let me look.")
    assert turn.tool_calls == (ToolCall("f", PLAIN),) * 2 and turn.errors == () and turn.final_answer is None


def test_a_call_quoted_in_thinking_has_no_effect(family):
    syntax, call = family
    for thought in (f"<think>I could {call} or <done></think>", f"continued {call} <done></think>"):
        assert parse_turn(thought + "hello", syntax).content == "hello"
        assert parse_turn(thought, syntax).tool_calls == () and parse_turn(thought, syntax).final_answer is None
        assert parse_turn(thought + call, syntax).tool_calls == (ToolCall("f", PLAIN),)
        assert parse_turn(thought + "42<done>", syntax).final_answer == "42"
    bare = f"<think>the text {syntax.opening} and </think>{call}"
    assert parse_turn(bare, syntax).tool_calls == (ToolCall("f", PLAIN),) and parse_turn(bare, syntax).errors == ()


def test_done_beside_a_call_is_not_done_yet(family):
    syntax, call = family
    turn = parse_turn(f"42 <done> {call}", syntax)
    assert turn.final_answer is None and len(turn.tool_calls) == 1


def test_the_closing_tag_may_be_missing_at_the_end_of_the_text():
    assert parse_turn(glm("f", ("q", "open"), close=""), GLM).tool_calls == (ToolCall("f", PLAIN),)
    assert parse_turn(qwen("f", ("q", "open"), close="</function>"), QWEN3_5).tool_calls == (ToolCall("f", PLAIN),)
    for text in (kimi(close=""), section(kimi(close="")), "<|tool_calls_section_begin|>" + kimi()):
        assert parse_turn(text, KIMI).tool_calls == (ToolCall("f", PLAIN),)
        assert parse_turn(text, KIMI).content == ""


def test_empty_arguments_are_none():
    for body in ("", " ", "null", '""'):
        assert parse_turn(section(kimi(body)), KIMI).tool_calls == (ToolCall("f", {}),)


UNOPENED = {
    "glm": (GLM, A_CALL["glm"]),
    "kimi": (KIMI, kimi()),
    "qwen": (QWEN3_5, A_CALL["qwen"]),
    "hermes": (HERMES, '<tool_call>\n{"name": "f", "arguments": {"q": "open"}}\n</tool_call>'),
}
"""Syntax and a good call."""
OFFERED = tools(q="string")


@pytest.fixture(params=list(UNOPENED))
def unopened(request):
    """(syntax, a good call without its opening tag)"""
    syntax, call = UNOPENED[request.param]
    return syntax, call.removeprefix(syntax.opening).strip()


def test_a_call_without_its_opening_tag_is_a_call(unopened):
    syntax, call = unopened
    for text in (call, call.removesuffix(syntax.closing), f"{call}\n{call}"):
        turn = parse_turn("<think>plan</think>I look.\n\n" + text, syntax, OFFERED)
        assert turn.tool_calls == (ToolCall("f", PLAIN),) * text.count("open") and turn.errors == ()
        assert turn.content == "I look."
    assert parse_turn(f"{call}</think>42<done>", syntax, OFFERED).final_answer == "42"


def test_what_may_be_a_call_without_its_opening_tag_says_what_is_missing(unopened):
    syntax, call = unopened
    other = [{"type": "function", "function": {"name": "g"}}]
    for text, offered, reason in (
        (call.replace("open", "\ud800"), OFFERED, "before it, and a string holds half of a surrogate pair."),
        (call, other, "before it, and there is no tool 'f'."),
        (f"f\n{syntax.closing}", OFFERED, f"before {syntax.closing}."),
    ):
        turn = parse_turn(text, syntax, offered)
        assert turn.tool_calls == () and turn.final_answer is None
        assert turn.errors == (f"Invalid tool call: {syntax.opening} is missing {reason}",)
        assert parse_turn(text + " <done>", syntax, offered).final_answer == text  # an answer says what it is
        assert parse_turn(text, syntax).errors == ()  # without tools nothing is a call


def test_a_second_closing_tag_is_no_second_call(family):
    syntax, call = family
    assert parse_turn(call + syntax.closing, syntax, OFFERED).errors == ()


def test_a_call_cut_off_in_its_arguments_is_an_error():
    assert (
        "is not closed with </arg_value>" in parse_turn(glm("f", ("q", "open")).split("</arg_value>")[0], GLM).errors[0]
    )
    assert "the JSON is malformed" in parse_turn(kimi('{"q": "op', close=""), KIMI).errors[0]
    cut = qwen("f", ("q", "open")).split("</parameter>")[0]
    assert "'q' is not closed with </parameter>" in parse_turn(cut, QWEN3_5).errors[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("<tool_call></tool_call>", "the tool's name must follow <tool_call>"),
        ('<tool_call>{"name":\n"f"}</tool_call>', "each argument must be <arg_key>"),
        (glm("f", ("q", "1"), ("q", "2")), "the argument 'q' appears twice"),
        (glm("f").replace("</tool_call>", "<arg_key>q</arg_key></tool_call>"), "each argument must be <arg_key>"),
        ("<tool_call>f<arg_key>q</arg_key><arg_value>1<arg_value>2</arg_value></tool_call>", "is not closed"),
        (glm("f", ("q", "\ud800")), "surrogate"),
    ],
)
def test_a_glm_call_that_cannot_be_read_says_why_and_the_next_one_counts(text, sentence):
    turn = parse_turn(text + A_CALL["glm"], GLM)
    assert len(turn.errors) == 1 and sentence in turn.errors[0] and turn.errors[0].startswith("Invalid tool call: ")
    assert turn.tool_calls == (ToolCall("f", PLAIN),)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("<tool_call></tool_call>", "<function=NAME> must follow <tool_call>"),
        ("<tool_call><function= ></function></tool_call>", "<function=NAME> must follow <tool_call>"),
        ('<tool_call>{"name": "f"}</tool_call>', "<function=NAME> must follow <tool_call>"),
        (qwen("f", ("q", "1"), ("q", "2")), "the parameter 'q' appears twice"),
        (qwen("f", close="and more</tool_call>"), "each argument must be <parameter=NAME>"),
        (qwen("f", ("q", "1<parameter=x>")), "the parameter 'q' is not closed"),
        (qwen("f", ("q", "\ud800")), "surrogate"),
    ],
)
def test_a_qwen_call_that_cannot_be_read_says_why_and_the_next_one_counts(text, sentence):
    turn = parse_turn(text + A_CALL["qwen"], QWEN3_5)
    assert len(turn.errors) == 1 and sentence in turn.errors[0] and turn.errors[0].startswith("Invalid tool call: ")
    assert turn.tool_calls == (ToolCall("f", PLAIN),)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (kimi("[1]"), "must be a JSON object"),
        (kimi('{"x": 1, "x": 2}'), "appears twice"),
        (kimi('{"x": NaN}'), "NaN is not JSON"),
        (kimi('{"x": ' + "9" * 5000 + "}"), "too large"),
        (kimi('{"x": ' + "[" * 100_000), "too deeply"),
        (kimi('{"x": "\\ud800"}'), "surrogate"),
        (kimi("{} and more"), "text between"),
        (kimi(call_id=" "), "functions.NAME:NUMBER"),
        ("<|tool_call_begin|>f {}<|tool_call_end|>", "<|tool_call_argument_begin|> must follow"),
    ],
)
def test_a_kimi_call_that_cannot_be_read_says_why_and_the_next_one_counts(text, sentence):
    turn = parse_turn(section(text, kimi()), KIMI)
    assert len(turn.errors) == 1 and sentence in turn.errors[0] and turn.errors[0].startswith("Invalid tool call: ")
    assert turn.tool_calls == (ToolCall("f", PLAIN),)


@pytest.mark.parametrize(
    ("call_id", "name"),
    [("functions.get_user:12", "get_user"), ("get_user", "get_user"), (" functions.a.b:c:0\n", "a.b:c"), ("x:1", "x")],
)
def test_the_name_of_a_kimi_call_is_in_its_id(call_id, name):
    turn = parse_turn(kimi(call_id=call_id), KIMI)
    assert turn.tool_calls == (ToolCall(name, PLAIN),) and turn.call_ids == (call_id.strip(),)


@pytest.mark.parametrize("body", ['```json\n{"q": "open"}\n```', '"{\\"q\\": \\"open\\"}"', ' {"q": "open"}\n'])
def test_fences_and_arguments_in_a_string_are_read(body):
    assert parse_turn(kimi(body), KIMI).tool_calls == (ToolCall("f", PLAIN),)


@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ("42", "string", "42"),
        ("42", "integer", 42),
        ("42", None, 42),
        ("42", ["string", "null"], "42"),
        ("null", ["string", "null"], None),
        ("true", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, True),
        ("true", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "true"),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"const": 7}, 7),
        ("7", {"enum": None, "type": None, "anyOf": "x"}, 7),
        ("", "string", ""),
        (" padded ", "string", " padded "),
        ("plain text", None, "plain text"),
        ("many", "integer", "many"),
        ('{"a": [1]}', "object", {"a": [1]}),
        ("9" * 5000, None, "9" * 5000),
        ("1 2", None, "1 2"),
        ("</tool_call> <tool_call>", "string", "</tool_call> <tool_call>"),
    ],
)
@pytest.mark.parametrize(("syntax", "write"), [(GLM, glm), (QWEN3_5, qwen)])
def test_the_schema_tells_a_string_from_other_values(written, kind, value, syntax, write):
    offered = tools(q=kind) if kind is not None else []
    turn = parse_turn(write("f", ("q", written)), syntax, offered)
    assert turn.errors == () and turn.tool_calls == (ToolCall("f", {"q": value}),)
    assert type(turn.tool_calls[0].arguments["q"]) is type(value)


@pytest.mark.parametrize(
    ("written", "kind", "value"),
    [
        ("True", "boolean", True),
        ("False", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}, False),
        ("None", ["integer", "null"], None),
        ("None", "string", "None"),
        ("True", None, "True"),
        ("two\n\nlines\n", "string", "two\n\nlines\n"),
    ],
)
def test_qwen_3_5_writes_booleans_and_null_as_python_does(written, kind, value):
    turn = parse_turn(qwen("f", ("q", written)), QWEN3_5, tools(q=kind) if kind is not None else [])
    assert turn.tool_calls == (ToolCall("f", {"q": value}),) and turn.errors == ()


def test_qwen_3_6_writes_them_as_json():
    call = Spoken("", "", (ToolCall("f", {"a": True, "b": None, "c": 1.5, "d": "x", "e": [None]}),))
    template = "<function=example_function_name> enable_thinking {{ v | string if v is string else v | tojson }}"
    old, new = (FORMATS["qwen3.5"].make(False, t).spoken(call) for t in (None, template))
    assert [line for line in old.splitlines() if line[0] != "<"] == ["True", "None", "1.5", "x", "[null]"]
    assert [line for line in new.splitlines() if line[0] != "<"] == ["true", "null", "1.5", "x", "[null]"]


def test_broken_json_where_an_object_is_due_is_an_error():
    turn = parse_turn(glm("f", ("q", '{"a": 1')), GLM, tools(q="object"))
    assert turn.tool_calls == () and "malformed" in turn.errors[0]


def test_a_flood_of_calls_is_cut_short(family):
    syntax, call = family
    turn = parse_turn(call * 5000, syntax)
    assert len(turn.tool_calls) == MAX_CALLS and len(turn.errors) == 1
    assert parse_turn(call * 5000 + "</think>42<done>", syntax).final_answer == "42"


GLM_PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<done>", "<arg_key>", "</arg_key>", "<arg_value>"]
QWEN_PIECES = ["<function=f>", "</function>", "<parameter=a>", "<parameter=", "</parameter>"]
KIMI_PIECES = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"]
PIECES = st.sampled_from(
    [
        *GLM_PIECES,
        "</arg_value>",
        *KIMI_PIECES,
        *QWEN_PIECES,
        "<|tool_call_argument_begin|>",
        "functions.f:0",
        "f",
        "{}",
        '{"a": 1}',
        "\n",
    ]
)
ODD_TOOLS = st.lists(
    st.sampled_from([*tools(f="string", a="integer"), {}, {"function": None}, {"function": {"name": "f"}}]), max_size=2
)


@settings(max_examples=400, deadline=None)
@given(st.lists(PIECES | st.text(max_size=6)).map("".join), st.sampled_from([GLM, KIMI, QWEN3_5]), ODD_TOOLS)
@example("<tool_call>f<arg_key>" * 3000, GLM, [])
@example("<|tool_call_begin|>" * 5000, KIMI, [])
@example("<tool_call><function=f><parameter=a>" * 3000, QWEN3_5, [])
def test_any_text_gives_a_turn(text, syntax, offered):
    turn = parse_turn(text, syntax, offered)
    assert turn.final_answer is None or not (turn.tool_calls or turn.errors)
    assert len(turn.call_ids) == len(turn.tool_calls)
    for call in turn.tool_calls:
        assert isinstance(call.arguments, dict) and call.name
        json.dumps([call.name, call.arguments], allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize(
    ("name", "family"),
    [("glm45", "glm-4.5"), ("kimi_k2", "kimi-k2"), ("qwen3_coder", "qwen3.5"), ("qwen3_coder", "qwen3-coder")],
)
def test_well_formed_calls_agree_with_vllms_parsers(name, family, tmp_path):
    pytest.importorskip("vllm")
    from family_tokenizers import make_folder
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    from megatron_fleet.models.chat.tokenizer import train_tokenizer

    if family == "kimi-k2":
        train_tokenizer(["text"], 320, tmp_path, FORMATS[family].tokens)
    else:
        make_folder(family, tmp_path)
    kinds = {"text": "string", "count": "integer", "rows": "array", "more": "object", "free": "string"}
    offered = tools(**kinds)
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=offered, model="m")
    oracle = ToolParserManager.get_tool_parser(name)(AutoTokenizer.from_pretrained(tmp_path), request.tools)
    chat = FORMATS[family].make(False, None)
    words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
    words = words.filter(lambda s: not set("<|") & set(s) and s.strip() == s)
    values = {
        "text": words,
        "count": st.integers(),
        "rows": st.lists(st.integers() | words, max_size=3),
        "more": st.dictionaries(words, st.booleans() | words, max_size=2),
        "free": words,
    }
    calls = st.lists(st.fixed_dictionaries({}, optional=values), min_size=1, max_size=3)

    @settings(max_examples=100, deadline=None)
    @given(calls)
    def check(drawn):
        turn = chat.spoken(Spoken("", "", tuple(ToolCall("f", arguments) for arguments in drawn)))
        theirs = oracle.extract_tool_calls(turn, request)
        ours = parse_turn(turn, chat.syntax, offered)
        assert [c.arguments for c in ours.tool_calls] == [json.loads(c.function.arguments) for c in theirs.tool_calls]
        assert [c.name for c in ours.tool_calls] == [c.function.name for c in theirs.tool_calls] == ["f"] * len(drawn)

    check()
