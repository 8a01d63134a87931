"""Our renderers against the models' own chat templates, of which only digests are kept (``record_templates.py``)."""

import json
from pathlib import Path

import pytest
from talks import Talks, digest, with_images

from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.models.chat.template_check import written
from megatron_fleet.models.kimi.tool_types import declare

RECORDED = json.loads(Path(__file__).with_name("template_digests.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", RECORDED["templates"], ids=lambda e: f"{e['file']}-thinking-{e['thinking']}")
def test_conversations_read_as_the_models_own_template_writes_them(entry):
    traits = "" if entry["spaced"] else "separators"
    chat = FORMATS[entry["family"]].make(entry["thinking"], "<function=" if entry.get("json_scalars") else traits)
    talks = Talks(RECORDED["seed"]).conversations(RECORDED["count"], entry["thinking"])
    ours = [digest(written(chat, with_images(t) if entry.get("images") else t)) for t in talks]
    assert ours == entry["digests"].split()


def test_tool_declarations_of_kimi_read_as_its_own_tokenizer_writes_them():
    tools = [[Talks(seed).tool(references=seed % 3 == 0) for _ in range(2)] for seed in range(RECORDED["count"])]
    texts = [declare(t) for t in tools]
    assert [digest(text or "") for text in texts] == RECORDED["declarations"]["digests"].split()
    assert 10 < texts.count(None) < RECORDED["count"] / 2


def test_the_conversations_show_what_tells_formats_apart():
    talks = list(Talks(RECORDED["seed"]).conversations(RECORDED["count"], thinking=False))
    rounds = [r for t in talks for r in t.rounds]
    assert any(len(r.spoken.calls) > 1 for r in rounds) and any(not r.spoken.calls for r in rounds)
    assert any(r.spoken.calls and r.spoken.index > 2 for r in rounds) and any(not t.tools for t in talks)
    assert any("<|im_end|>" in text for r in rounds for text in r.shown)


def test_every_family_has_been_compared_but_those_whose_templates_are_only_checked_live():
    assert set(FORMATS) - {e["family"] for e in RECORDED["templates"]} == {"kimi-k2.5", "qwen3-thinking"}
