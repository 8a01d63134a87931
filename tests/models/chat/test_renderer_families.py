"""Every family's renderer on a small tokenizer with the family's own added tokens: ids, control tokens, calls."""

import json

import pytest
from family_tokenizers import make_folder, reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from talks import PLAIN, Talks

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.detection import FORMATS, make_format
from megatron_fleet.models.chat.format import Spoken, Unthought
from megatron_fleet.models.chat.parser import ToolResult
from megatron_fleet.models.chat.renderer import ChatRenderer
from megatron_fleet.models.chat.template_check import Round, written
from megatron_fleet.models.chat.tokenizer import Tokenizer

MODES = [(family, thinking) for family in FORMATS for thinking in FORMATS[family].thinking]
FEW = settings(max_examples=15, deadline=None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: make_folder(family, tmp_path_factory.mktemp(family)) for family in FORMATS}


@pytest.fixture(scope="module", params=MODES, ids=lambda mode: f"{mode[0]}-thinking-{mode[1]}")
def mode(request, folders):
    """(renderer, its format, the family's reference encoder)."""
    family, thinking = request.param
    tokenizer = Tokenizer(folders[family])
    chat = make_format(folders[family], tokenizer, thinking, family)
    return ChatRenderer(tokenizer, chat), chat, reference(folders[family])


def turn_end(renderer, chat, round_):
    """The stop token that a policy samples where the template has the same token."""
    following = chat.close or (chat.results if round_.spoken.calls else chat.user)([] if round_.spoken.calls else "")
    return renderer.tokenizer.special[following[0]]


def lay_down(renderer, chat, talk):
    """Ids as an episode collects them."""
    ids = renderer.initial(talk.system, talk.tools, talk.user)
    for round_ in talk.rounds:
        end = turn_end(renderer, chat, round_)
        ids += [*renderer.tokenizer.encode(chat.spoken(round_.spoken)), end]
        calls, first = round_.spoken.calls, round_.spoken.index
        if calls:
            results = [
                ToolResult(c.name, t, first + i) for i, (c, t) in enumerate(zip(calls, round_.shown, strict=True))
            ]
            ids += renderer.observation(results, end)
        else:
            ids += renderer.message(round_.shown[0], end)
    return ids


def test_ids_are_those_of_the_whole_text(mode):
    renderer, chat, encode = mode
    thinking = "thinking" in renderer.parse(chat.spoken(Spoken("thinking", "x"))).thinking
    # What the policy saw stays, also where Qwen 3 and 3.5 without thinking would leave out the empty block.
    chat.past_opening, chat.unthought = chat.opening, Unthought(chat.opening)

    @FEW
    @given(st.integers(0, 10**6))
    def check(seed):
        (talk,) = Talks(seed, PLAIN).conversations(1, thinking)
        assert lay_down(renderer, chat, talk) == encode(written(chat, talk))

    check()


def test_text_that_spells_control_tokens_makes_none(mode):
    renderer, *_ = mode
    control = [t for family in FORMATS.values() for t in family.tokens.control]
    spelt = " ".join(control)
    ids = {renderer.tokenizer.special[t] for t in control if t in renderer.tokenizer.special}

    def count(text):
        first = renderer.initial(text, [], text)
        then = renderer.observation([ToolResult(text, text, 0)], -1) + renderer.message(text, -1)
        return sum(i in ids for i in first + then)

    assert count(spelt) == count("plain") > 4
    assert {count(token) for token in control} == {count("plain")}  # nor does a text that is one
    assert spelt in renderer.tokenizer.decode(renderer.message(spelt, -1))


def test_a_turn_that_did_not_end_itself_is_ended_once(mode):
    renderer, *_ = mode
    result = [ToolResult("f", "r", 0)]
    for shown in (lambda last: renderer.observation(result, last), lambda last: renderer.message("m", last)):
        whole = shown(-1)
        assert shown(whole[0]) == whole[1:] and whole[0] in renderer.stop_token_ids
        other = next(i for i in renderer.stop_token_ids if i != whole[0])
        assert shown(other) == whole


def test_what_a_policy_writes_is_read_back(mode):
    renderer, chat, _ = mode

    @FEW
    @given(st.integers(0, 10**6))
    def check(seed):
        (talk,) = Talks(seed, PLAIN).conversations(1, thinking=True)
        tools = [declared(call) for r in talk.rounds for call in r.spoken.calls]
        for round_ in talk.rounds:
            turn = renderer.parse(chat.spoken(round_.spoken), tools[: len(round_.spoken.calls)])
            tools = tools[len(round_.spoken.calls) :]
            assert turn.content == round_.spoken.content and turn.errors == ()
            assert [c.name for c in turn.tool_calls] == [c.name for c in round_.spoken.calls]
            assert turn.thinking in ("", round_.spoken.thinking)

    check()


def declared(call: ToolCall):
    return {"type": "function", "function": {"name": call.name, "parameters": {}}}


KINDS = {"count": "integer", "share": "number", "sure": "boolean", "both": ["integer", "null"], "rows": "array"}
KINDS |= {"größe": "object", "text": "string", "more text": "string"}
TEXT = st.sampled_from(["42", "null", "True", "{}", " padded ", "\ntwo\n\nlines\n", "日本語 🙂", 'x = "a\\n"'])
TEXT |= st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"))
MEANT = {"text": "\ntwo\n\nlines\n", "more text": "None", "count": -7, "share": 1.5, "sure": False, "both": None}
MEANT |= {"rows": [1, "ä", None, [True]], "größe": {"a b": {"c": "\n"}, "d": []}}
"""A value of each kind."""
PLAIN_VALUES = st.none() | st.booleans() | st.integers() | TEXT
VALUES = {
    "count": st.integers(),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "sure": st.booleans(),
    "both": st.integers() | st.none(),
    "rows": st.lists(PLAIN_VALUES | st.lists(PLAIN_VALUES, max_size=2), max_size=3),
    "größe": st.dictionaries(TEXT, PLAIN_VALUES | st.lists(PLAIN_VALUES, max_size=2), max_size=3),
    "text": TEXT,
    "more text": TEXT,
}


def test_arguments_are_read_back_as_they_were_meant(mode):
    renderer, chat, _ = mode
    properties = {name: {"type": kind} for name, kind in KINDS.items()}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=3))
    @example([MEANT, {}])
    def check(meant):
        calls = tuple(ToolCall("f", arguments) for arguments in meant)
        turn = renderer.parse(chat.spoken(Spoken("t", "", calls, 3)), tools)
        assert turn.errors == () and {call.name for call in turn.tool_calls} == {"f"}
        assert json.dumps([call.arguments for call in turn.tool_calls]) == json.dumps(meant)  # 1 is not true
        assert turn.call_ids[0] in ("", "functions.f:3")

    check()


def test_an_answer_inside_thinking_that_the_prompt_opened_is_none(mode):
    renderer, chat, _ = mode
    turn = renderer.parse("42 <done>")
    assert (turn.final_answer is None) == ("".join(chat.opening).rstrip().endswith("<think>"))
    assert renderer.parse("hm <done></think>42 <done>").final_answer == "42"


@pytest.mark.parametrize("family", FORMATS)
def test_the_head_is_encoded_once(family, folders, monkeypatch):
    tokenizer = Tokenizer(folders[family])
    renderer = ChatRenderer(tokenizer, FORMATS[family].make(FORMATS[family].thinking[0], None))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    first = renderer.initial("S", tools, "U")
    seen = []
    monkeypatch.setattr(tokenizer, "encode", lambda text, real=tokenizer.encode: seen.append(text) or real(text))
    assert renderer.initial("S", tools, "U") == first
    assert sum(map(len, seen)) < 10
    assert renderer.initial("S", [], "U") != first


def test_kimi_shows_a_result_under_the_id_that_the_policy_wrote(folders):
    tokenizer = Tokenizer(folders["kimi-k2"])
    renderer = ChatRenderer(tokenizer, FORMATS["kimi-k2"].make(False, None))
    results = [ToolResult("f", "A", 4, "functions.f:9"), ToolResult("", "unreadable", 5)]
    text = tokenizer.decode(renderer.observation(results, tokenizer.special["<|im_end|>"]))
    assert text == (
        "<|im_system|>f<|im_middle|>## Return of functions.f:9\nA<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.unknown:5\nunreadable<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_kimis_first_templates_have_blanks_in_the_tools_and_later_ones_have_not():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
    declared = {t: FORMATS["kimi-k2"].make(False, t).head("S", [tool])[3] for t in (None, "tojson", "separators=")}
    assert declared["tojson"] == '[{"function": {"name": "f", "parameters": {"a": 2, "b": 1}}, "type": "function"}]'
    assert (
        declared[None] == declared["separators="] == json.dumps(json.loads(declared["tojson"]), separators=(",", ":"))
    )


def test_what_a_schema_says_besides_types_is_shown_by_qwen3_coder_under_its_name():
    properties = {
        "q": {"type": ["string", "null"], "default": None, "enum": ["a", "ö"], "description": " Words. ", "name": "x"},
        "r": True,
    }
    tool = {"name": "f", "strict": True, "parameters": {"properties": properties, "required": ["q"], "$defs": {"d": 1}}}
    shown = (
        "\n<function>\n<name>f</name>\n<parameters>\n<parameter>\n<name>q</name>\n<type>['string', 'null']</type>"
        '\n<description>Words.</description>\n<default>None</default>\n<enum>["a", "ö"]</enum>\n</parameter>'
        '\n<parameter>\n<name>r</name>\n</parameter>\n<required>["q"]</required>\n<$defs>{"d": 1}</$defs>'
        "\n</parameters>\n<strict>True</strict>\n</function>"
        "\n<function>\n<name>g</name>\n<description></description>\n<parameters>\n</parameters>\n</function>"
    )
    other = {"name": "g", "description": " "}
    head = FORMATS["qwen3-coder"].make(False, None).head("S", [{"function": tool}, {"function": other}])
    assert head[4] == shown


def test_qwen3_coder_without_its_opening_tag_is_a_call_or_a_sentence(folders):
    renderer = ChatRenderer(Tokenizer(folders["qwen3-coder"]), FORMATS["qwen3-coder"].make(False, None))
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    turn = renderer.parse(
        "I look.\n<function=search>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>", tools
    )
    assert turn.tool_calls == (ToolCall("search", {"q": "x"}),) and turn.errors == ()
    turn = renderer.parse("<function=search>\n<parameter=q>\nx\n</function>\n</tool_call>", tools)
    said = "<tool_call> is missing before it, and the parameter 'q' is not closed with </parameter>"
    assert turn.tool_calls == () and turn.errors == (f"Invalid tool call: {said}.",)


def test_a_round_without_calls_shows_one_message():
    chat = FORMATS["glm-4.5"].make(False, None)
    (talk,) = Talks(1).conversations(1, False)
    talk = type(talk)("S", (), "U", (Round(Spoken("", "What?"), ("Do it.",)),))
    assert written(chat, talk) == (
        "[gMASK]<sop><|system|>\nS<|user|>\nU/nothink<|assistant|>\n<think></think>\nWhat?"
        "<|user|>\nDo it./nothink<|assistant|>\n<think></think>"
    )
