"""Conversations as token ids in the Qwen3 format, append-only.

What the policy sampled is never decoded and encoded again: each piece of text is encoded once, between two control
tokens, and appended. The ids equal ``apply_chat_template`` (tests/agents/test_renderer.py) except where the template
would rewrite what the policy has already seen, which an append-only sequence must not do:

* it drops the thinking of every assistant turn before the last question, so after a reminder (a plain user turn) the
  earlier turns lose theirs;
* with thinking off it writes the empty thinking block for the last assistant turn only;
* it re-spaces a sampled turn (line ends around ``</think>``, the JSON of a tool call).

It also differs on purpose where text spells a control token such as ``<|im_end|>``: here that stays text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from megatron_fleet.agents.chat_template import EMPTY_THINKING, TOOLS_HEAD, TOOLS_TAIL
from megatron_fleet.agents.tokenizer import END_OF_TEXT, IM_END, IM_START, Tokenizer

_CACHED_SYSTEM_TURNS = 64  # one per environment and tool set


def to_json(value: Any) -> str:
    """JSON as the template's ``tojson`` writes it: unescaped Unicode, ``", "`` and ``": "`` between items."""
    return json.dumps(value, ensure_ascii=False)


class Qwen3Renderer:
    """Renders one model family's turns. Holds no conversation, so all episodes of a process share one.

    Attributes:
        tokenizer: decodes what the policy sampled.
        stop_token_ids: tokens that end an assistant turn.
    """

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        """``thinking`` false opens every assistant turn with the empty thinking block, as Qwen3 expects."""
        self.tokenizer = tokenizer
        self._start = tokenizer.special[IM_START]
        self._end = tokenizer.special[IM_END]
        self.stop_token_ids = (self._end, tokenizer.special[END_OF_TEXT])
        self._close = [self._end, *tokenizer.encode("\n")]
        opening = "assistant\n" if thinking else "assistant\n" + EMPTY_THINKING
        self._open_assistant = [self._start, *tokenizer.encode(opening)]
        self._system_turn = lru_cache(_CACHED_SYSTEM_TURNS)(self._encode_system_turn)

    def initial(self, system: str, tools: Sequence[Mapping[str, Any]], user: str) -> list[int]:
        """Ids of the first prompt: system text, tool definitions (OpenAI function format), question, opened answer."""
        block = "".join("\n" + to_json(t) for t in tools)
        return [*self._system_turn(system, block), *self._turn("user\n" + user), *self._open_assistant]

    def observation(self, texts: Sequence[str], role: Literal["tool", "user"], last_id: int) -> list[int]:
        """Ids to append after a sampled turn so that the policy can go on.

        Args:
            texts: results of the tool calls in order (``tool``), or one message (``user``).
            role: ``tool`` wraps each text in ``<tool_response>``; ``user`` speaks as the user.
            last_id: last sampled id; a turn that did not end itself with ``<|im_end|>`` is ended here.
        """
        if role == "tool":
            text = "user" + "".join(f"\n<tool_response>\n{t}\n</tool_response>" for t in texts)
        else:
            text = "user\n" + "\n".join(texts)
        closing = self._close[1:] if last_id == self._end else self._close
        return [*closing, *self._turn(text), *self._open_assistant]

    def text(self, sampled_ids: Sequence[int]) -> str:
        """Text of a sampled turn without the stop token that ended it."""
        ids = sampled_ids[:-1] if len(sampled_ids) and sampled_ids[-1] in self.stop_token_ids else sampled_ids
        return self.tokenizer.decode(ids)

    def _turn(self, text: str) -> list[int]:
        return [self._start, *self.tokenizer.encode(text), *self._close]

    def _encode_system_turn(self, system: str, tool_block: str) -> tuple[int, ...]:
        text = "system\n" + system
        if tool_block:
            text += "\n\n" + TOOLS_HEAD + tool_block + TOOLS_TAIL
        return tuple(self._turn(text))
