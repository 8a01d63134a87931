"""Step-wise prompts against the models' own chat templates, where these leave out what earlier turns thought."""

import json

import pytest
from family_tokenizers import make_folder
from record_dropped import DIGESTS, talks
from talks import digest

from megatron_fleet.agents.history import Exchange, TokenHistory
from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.parser import ToolResult
from megatron_fleet.models.chat.renderer import ChatRenderer
from megatron_fleet.models.chat.template_check import Dialogue, Round
from megatron_fleet.models.chat.tokenizer import Tokenizer

RECORDED = json.loads(DIGESTS.read_text(encoding="utf-8"))["templates"]


def exchange(renderer: ChatRenderer, chat, round_: Round) -> Exchange:
    """The turn as a policy that keeps to the template samples it, with the token that ends it."""
    said = round_.spoken
    results = tuple(
        ToolResult(c.name, t, said.index + i) for i, (c, t) in enumerate(zip(said.calls, round_.shown, strict=False))
    )
    follows = chat.close or (chat.results(results) if said.calls else chat.user(round_.shown[0]))
    end = renderer.tokenizer.special[follows[0]]
    action = (*renderer.tokenizer.encode(chat.spoken(said)), end)
    return Exchange(action, results if said.calls else (), "" if said.calls else round_.shown[0])


def prompts(renderer: ChatRenderer, chat, talk: Dialogue) -> list[str]:
    """The first prompt, and the one after each round."""
    history = TokenHistory(renderer, talk.system, talk.tools, talk.user, "", drop_thinking=True)
    found = [history.render()]
    for round_ in talk.rounds:
        newest = exchange(renderer, chat, round_)
        found.append(history.render(newest))
        history.add(newest)
        assert history.render() == found[-1]
    return [renderer.tokenizer.decode(ids) for ids in found]


@pytest.mark.parametrize("entry", RECORDED, ids=lambda e: e["file"])
def test_the_last_prompt_is_what_the_template_writes(entry, tmp_path):
    tokenizer = Tokenizer(make_folder(entry["family"], tmp_path))
    chat = FORMATS[entry["family"]].make(True, "")
    renderer = ChatRenderer(tokenizer, chat)
    found = [prompts(renderer, chat, talk)[-1] for talk in talks()]
    assert [digest(text) for text in found] == entry["digests"].split()
    assert not any("I think" in text for text in found)


def test_kimi_k2_5_shows_an_empty_block(tmp_path):
    """Its template is not kept; what it writes for an earlier turn is ``<think></think>`` and the text."""
    tokenizer = Tokenizer(make_folder("kimi-k2.5", tmp_path))
    chat = FORMATS["kimi-k2.5"].make(True, None)
    rounds = (Round(Spoken("I think", "Well."), ("Go on.",)),)
    text = prompts(ChatRenderer(tokenizer, chat), chat, Dialogue("s", (), "u", rounds))[-1]
    turn = "<|im_assistant|>assistant<|im_middle|>"
    assert text.endswith(
        f"{turn}<think></think>Well.<|im_end|><|im_user|>user<|im_middle|>Go on.<|im_end|>{turn}<think>"
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "glm-4.5", "glm-4.7", "kimi-k2-thinking", "kimi-k2.5"])
def test_thinking_that_was_never_closed_is_left_out_to_the_end(family, tmp_path):
    tokenizer = Tokenizer(make_folder(family, tmp_path))
    chat = FORMATS[family].make(True, None)
    renderer = ChatRenderer(tokenizer, chat)
    opened = "" if chat.opens_thinking else "<think>"
    history = TokenHistory(renderer, "s", (), "u", "", drop_thinking=True)
    text = tokenizer.decode(history.render(Exchange(tuple(tokenizer.encode(opened + "on and on")), (), "Go on.")))
    unthought, close = "".join(chat.unthought.opening), "".join(chat.close)
    assert "on and on" not in text
    assert text.endswith(unthought + close + "".join([*chat.user("Go on."), *chat.opening]))
