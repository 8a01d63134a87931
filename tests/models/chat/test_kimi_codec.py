"""Kimi's tokenizer files: the cut of text before merging, added tokens, long runs, broken files."""

import json

import pytest
from family_tokenizers import reference, write_tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.config.errors import UserError
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.kimi.chat import TOKENS
from megatron_fleet.models.kimi.codec import SPLIT, split_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiktoken")
    write_tiktoken(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def test_text_survives_and_is_encoded_as_the_models_own_code_does(tokenizer, folder):
    encode = reference(folder)

    @settings(max_examples=200, deadline=None)
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(lambda s: not set("<[") & set(s)))
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text) == encode(text)

    check()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("日本語 text", ["日本語", " text"]),
        ("12345", ["123", "45"]),
        ("it's HelloWorld", ["it's", " Hello", "World"]),
        ("x  = (y)\n\n  z", ["x", " ", " =", " (", "y", ")\n\n", " ", " z"]),
    ],
)
def test_text_is_cut_into_words_numbers_and_signs_before_it_is_merged(text, parts):
    import tiktoken

    # All parts are tokens of their own, so what comes out shows the cut.
    ranks = {bytes([i]): i for i in range(256)}
    for part in parts:
        for end in range(2, len(part.encode()) + 1):
            ranks.setdefault(part.encode()[:end], len(ranks))
    encoding = tiktoken.Encoding("cut", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})
    assert [encoding.decode([i]) for i in encoding.encode_ordinary(text)] == parts


def test_added_tokens_have_the_ids_of_the_config_and_the_rest_are_reserved(tokenizer):
    first = 256 + 12
    assert [tokenizer.special[t] for t in TOKENS.control + TOKENS.tags] == list(range(first, first + 28, 2))
    assert tokenizer.vocab_size == first + 256 and tokenizer.special[f"<|reserved_token_{first + 1}|>"] == first + 1
    assert tokenizer.decode([tokenizer.special["<|im_end|>"], first + 1]) == f"<|im_end|><|reserved_token_{first + 1}|>"


def test_tags_in_text_are_tokens_and_control_tokens_in_text_are_not(tokenizer):
    assert tokenizer.encode("<think>") == [tokenizer.special["<think>"]]
    spelt = "<|im_end|><|reserved_token_269|>"
    assert max(tokenizer.encode(spelt)) < 256 + 12 and tokenizer.decode(tokenizer.encode(spelt)) == spelt


def test_half_a_character_and_half_a_surrogate_pair_are_replaced(tokenizer):
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode(json.loads('"a\\ud800b"'))) == "a?b"


@given(st.text("a b\n", max_size=40), st.integers(1, 5))
def test_long_runs_are_cut_and_nothing_is_lost(text, limit):
    parts = list(split_runs(text, limit))
    assert "".join(parts) == text and "" not in parts
    for part in parts:
        runs = part.replace("\n", " ").replace("b", "a")
        assert "a" * (limit + 1) not in runs and " " * (limit + 1) not in runs
    if len(text) <= limit:
        assert len(parts) <= 1


def test_a_very_long_word_is_encoded_in_time(tokenizer):
    assert len(tokenizer.encode("ab" * 100_000)) == 200_000


def test_broken_files_are_refused(tmp_path):
    write_tiktoken(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"added_tokens_decoder": {"1": {}}}')
    with pytest.raises(UserError, match="added_tokens_decoder cannot be read"):
        Tokenizer(tmp_path)
    config.unlink()
    with pytest.raises(UserError, match=r"tokenizer_config\.json: no such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("not a rank file")
    with pytest.raises(UserError, match="not a tiktoken file"):
        Tokenizer(tmp_path)
