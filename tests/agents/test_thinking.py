"""Thinking found by token ids, against what the text says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_fixtures import CORPUS

from megatron_fleet.agents.thinking import Thinking
from megatron_fleet.models.chat.chat_renderer import ChatRenderer
from megatron_fleet.models.chat.tokenizer import Tokenizer, train_tokenizer
from megatron_fleet.models.kimi import chat as kimi
from megatron_fleet.models.kimi.chat import Kimi

texts = st.lists(st.sampled_from(["<think>", "</think>", "\n", "\n\n", "so ", "x", "<tool_call>"]), max_size=9).map(
    "".join
)


def spoken_outside(text: str) -> str:
    """What the Qwen 3 template keeps of an earlier turn, and of one whose thinking was never closed."""
    if "</think>" in text:
        return text.split("</think>")[-1].lstrip("\n")
    return text.split("<think>")[0]


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
    quiet = Thinking(ChatRenderer(tokenizer, Kimi("k2.5", thinking=False)))
    assert quiet.count(tokenizer.encode("plan")) == 0
