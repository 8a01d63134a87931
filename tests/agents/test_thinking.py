"""Thinking found by token ids, against what the text says."""

import pytest
from family_tokenizers import make_folder
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_fixtures import CORPUS

from megatron_fleet.agents.history import Thinking
from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.renderer import ChatRenderer
from megatron_fleet.models.chat.tokenizer import Tokenizer, train_tokenizer
from megatron_fleet.models.kimi import chat as kimi
from megatron_fleet.models.kimi.chat import Kimi

texts = st.lists(st.sampled_from(["<think>", "</think>", "\n", "\n\n", "so ", "x"]), max_size=9).map("".join)


def spoken_outside(text: str) -> str:
    """Text of an earlier turn that the Qwen 3 template keeps; thinking that was never closed is removed."""
    spoken = text.split("</think>")[-1]
    return (spoken.lstrip("\n") if "</think>" in text else spoken).split("<think>")[0]


@given(texts)
def test_without_is_what_the_template_keeps(tokenizer, renderer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(Thinking(renderer).without(ids)) == "<|im_start|>assistant\n" + spoken_outside(text)


@pytest.mark.parametrize(
    ("text", "thought"),
    [
        ("<think>a b</think>c", "<think>a b</think>"),
        ("c", ""),
        ("a</think>c", "a</think>"),
        ("c<think>a", "<think>a"),
        ("<think>a</think>c<think>b</think>", "<think>a</think><think>b</think>"),
        ("<think>a<think>b</think>c", "<think>a<think>b</think>"),
        ("<think>a</think>c</think>d", "<think>a</think>c</think>"),
        ("", ""),
    ],
)
def test_count(tokenizer, renderer, text, thought):
    assert Thinking(renderer).count(tokenizer.encode(text)) == len(tokenizer.encode(thought))


def test_where_the_prompt_opens_the_thinking(tmp_path):
    train_tokenizer(CORPUS, 400, tmp_path, kimi.TOKENS)
    tokenizer = Tokenizer(tmp_path)
    thinking = Thinking(ChatRenderer(tokenizer, Kimi("k2.5", thinking=True)))
    for text, thought, kept in (
        ("plan</think>c", "plan</think>", "c"),
        ("plan", "plan", ""),
        ("plan</think>\n\nc", "plan</think>", "\n\nc"),
    ):
        ids = tokenizer.encode(text)
        assert thinking.count(ids) == len(tokenizer.encode(thought))
        shown = "<|im_assistant|>assistant<|im_middle|><think></think>" + kept
        assert tokenizer.decode(thinking.without(ids)) == shown
    call = Kimi("k2.5", thinking=False).spoken(Spoken("", "", (ToolCall("find", {}),)))
    spelled = [*tokenizer.encode("plan</th"), *tokenizer.encode("ink>" + call)]  # the parser takes it as the tag
    assert tokenizer.decode(thinking.without(spelled)).endswith(call) and thinking.count(spelled) == 0
    quiet = Thinking(ChatRenderer(tokenizer, Kimi("k2.5", thinking=False)))
    assert quiet.count(tokenizer.encode("plan")) == 0


CASES = [(family, thinking) for family, named in FORMATS.items() for thinking in named.thinking]
SAID = ("<think>", "</think>", "so ", "\n\n", "<done>", "<tool_call>", "</tool_call>")
said = st.lists(st.sampled_from(SAID), max_size=4).map("".join)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory):
    """A renderer of each format."""
    folders = {family: make_folder(family, tmp_path_factory.mktemp("tokenizer")) for family in FORMATS}
    return {
        (family, thinking): ChatRenderer(Tokenizer(folders[family]), FORMATS[family].make(thinking, None))
        for family, thinking in CASES
    }


@pytest.mark.parametrize("case", CASES)
@given(parts=st.lists(said | said.map(lambda q: ToolCall("find", {"q": q})), max_size=5))
@example(parts=["<think>", ToolCall("find", {"q": "a</think>b"})])
@example(parts=["<think>a</think>", ToolCall("find", {"q": "a</think>b"}), "<think>c"])
@example(parts=[ToolCall("find", {"q": "a<think>b"})])
@example(parts=[ToolCall("find", {"q": "1"}), "<think>a</think>", ToolCall("find", {"q": "2"})])
def test_a_call_that_the_parser_reads_is_kept(renderers, case, parts):
    renderer, chat = renderers[case], FORMATS[case[0]].make(case[1], None)
    ids = []
    for part in parts:
        text = part if isinstance(part, str) else chat.spoken(Spoken("", "", (part,)))
        ids += renderer.tokenizer.encode(text)
    ids.append(renderer.stop_token_ids[0])
    thinking, parsed = Thinking(renderer), renderer.parse(renderer.text(ids))
    assert 0 <= thinking.count(ids) <= len(ids)
    closed = renderer.tokenizer.encode("</think>")  # where the prompt opens the thinking, the parser takes it as open
    kept = thinking.without(ids)
    for opening in (renderer.opening, renderer.unthought):
        if tuple(kept[: len(opening)]) == opening:
            again = [renderer.parse(renderer.text([*before, *kept[len(opening) :]])) for before in ([], closed)]
            if parsed.tool_calls in [turn.tool_calls for turn in again]:
                break
    else:
        raise AssertionError(renderer.tokenizer.decode(kept))


def test_a_tag_in_the_arguments_of_a_call_is_no_thinking(tokenizer, renderer):
    call = '<tool_call>\n{"name": "find", "arguments": {"q": "a</think>b<think>c"}}\n</tool_call>'
    thinking = Thinking(renderer)
    for thought in ("", "<think>plan</think>"):
        ids = tokenizer.encode(thought + call)
        assert tokenizer.decode(thinking.without(ids)) == "<|im_start|>assistant\n" + call
        assert thinking.count(ids) == len(tokenizer.encode(thought))
    many = tokenizer.encode(call.replace("a</think>b", "</think>" * 3000))
    assert thinking.without(many)[-len(many) :] == many
