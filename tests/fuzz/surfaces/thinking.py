"""The ids that a policy sampled: their text, the thinking in them, and the prompt that goes on behind them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fuzz import models
from fuzz.engine import Surface
from fuzz.trees import value_of

from megatron_fleet.agents.history import Thinking
from megatron_fleet.models.chat.detection import make_renderer
from megatron_fleet.models.chat.parser import ToolResult
from megatron_fleet.models.chat.renderer import Renderer


@cache
def _renderer(thinking: bool) -> Renderer:
    return make_renderer(models.TINY, thinking, "qwen3")


def seeds() -> list[Any]:
    encode, special = _renderer(True).tokenizer.encode, _renderer(True).tokenizer.special
    turn = [special["<think>"], *encode("hm\n"), special["</think>"], *encode("\n\nok"), special["<|im_end|>"]]
    return [{"ids": ids, "thinking": t, "text": "a result"} for ids in (turn, turn[1:], encode("ok")) for t in (0, 1)]


def check(tree: Any, folder: Path) -> bool:
    tree = value_of(tree)
    tree = tree if isinstance(tree, dict) else {}
    renderer = _renderer(bool(tree.get("thinking")))
    given, text = tree.get("ids"), tree.get("text")
    vocabulary = renderer.tokenizer.vocab_size
    ids = [i % vocabulary for i in given if type(i) is int] if isinstance(given, list) else []
    thinking = Thinking(renderer)
    assert 0 <= thinking.count(ids) <= len(ids)
    kept = thinking.without(ids)
    assert isinstance(kept, list) and all(0 <= i < vocabulary for i in kept)
    renderer.parse(renderer.text(ids))
    said = text if isinstance(text, str) else ""
    controls = {renderer.tokenizer.special[token] for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    assert not controls & set(renderer.tokenizer.encode(said))
    shown = renderer.observation([ToolResult("find", said, 0)], ids[-1] if ids else 0)
    assert shown[-len(renderer.opening) :] == list(renderer.opening)
    return True


SURFACE = Surface("thinking", 1500, seeds, check, words=("<think>", "</think>", "<|im_end|>", "<|im_start|>"))
