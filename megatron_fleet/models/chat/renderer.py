"""Conversations as token ids in a model family's format, append-only: interface for episodes, and implementation.

Sampled text is never decoded and re-encoded: each piece of text is encoded once, between two control tokens, and
appended. The ids match the model's own chat template (tests/models/chat/test_renderer*.py) except where the template
would rewrite tokens the policy has already seen, which an append-only sequence must not do:

* the templates of thinking models drop the thinking of turns before the last question (Qwen 3 and 3.5, GLM 4.5 to
  4.7) or before the last turn without a tool call (Kimi K2 Thinking, K2.5): after a reminder, which is a plain user
  turn, earlier turns would lose theirs;
* with thinking off, Qwen 3 puts the empty thinking block only in the last assistant turn, Qwen 3.5 in the turns after
  the last question; here every turn keeps it;
* templates normalise whitespace in a sampled turn: line ends around ``</think>``, the JSON of a tool call, the ids of
  Kimi's calls;
* GLM ends a turn with the token that begins the next one. When the policy ends with another of its stop tokens, that
  token stays and the expected one follows.

They also differ deliberately where text spells a control token such as ``<|im_end|>``: here it stays text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.format import ChatFormat, encode
from megatron_fleet.models.chat.parser import ParsedTurn, ToolResult, Tools, parse_turn
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.images import Vision

_CACHED_HEADS = 64  # one per environment and tool set


def to_json(value: Any) -> str:
    """Serialise as the templates' ``tojson`` does: unescaped Unicode, ``", "`` and ``": "`` as separators."""
    return json.dumps(value, ensure_ascii=False)


class Renderer(Protocol):
    """Conversation format of one model family. Stateless, so all episodes of a process share one.

    Attributes:
        tokenizer: the model's tokenizer.
        stop_token_ids: tokens that end an assistant turn.
        vision: image tokenization; ``None`` if the model sees no images, and none may be given.
        opening: ids at the end of every prompt, which begin the next turn.
        unthought: ids that replace ``opening`` and the thinking in a turn whose thinking is dropped.
        strips_unthought: line ends after the dropped thinking are dropped too.
    """

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    vision: Vision | None
    opening: tuple[int, ...]
    unthought: tuple[int, ...]
    strips_unthought: bool

    def initial(
        self, system: str, tools: Sequence[Mapping[str, Any]], user: str, images: Sequence[Image] = ()
    ) -> list[int]:
        """Ids of the first prompt: system text, tool definitions (OpenAI function format), question, answer opening.

        ``images``: shown with the question, like ``ToolResult.images`` with a result.
        """
        ...

    def observation(self, results: Sequence[ToolResult], last_id: int) -> list[int]:
        """Ids that follow a sampled turn: its end, the results in call order, the opening of the next turn.

        ``last_id`` is the last sampled id; a turn that did not end with a stop token is ended here.
        """
        ...

    def message(self, text: str, last_id: int) -> list[int]:
        """Like ``observation``, for a plain user turn."""
        ...

    def text(self, sampled_ids: Sequence[int]) -> str:
        """Text of a sampled turn without its stop token."""
        ...

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        """Parse a sampled turn by the family's tool-call syntax; never raises.

        ``tools`` are the definitions that the policy was offered: some formats do not distinguish ``"42"`` from ``42``.
        """
        ...


class ChatRenderer:
    """A ``Renderer`` for one format and one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, vision: Vision | None = None) -> None:
        self.tokenizer = tokenizer
        self.vision = vision
        self.stop_token_ids = tuple(tokenizer.special[t] for t in chat.stops if t in tokenizer.special)
        self._chat = chat
        self._close = encode(chat.close, tokenizer)
        self.opening = tuple(encode(chat.opening, tokenizer))
        self.unthought = tuple(encode(chat.unthought.opening, tokenizer))
        self.strips_unthought = chat.unthought.strips
        self._head = lru_cache(_CACHED_HEADS)(self._encode_head)

    def initial(
        self, system: str, tools: Sequence[Mapping[str, Any]], user: str, images: Sequence[Image] = ()
    ) -> list[int]:
        """See ``Renderer``."""
        head = self._head(system, json.dumps(tools, ensure_ascii=False))
        return [*head, *encode(self._chat.user(user, images), self.tokenizer, self.vision), *self.opening]

    def observation(self, results: Sequence[ToolResult], last_id: int) -> list[int]:
        """See ``Renderer``."""
        return self._after_turn(self._chat.results(results), last_id)

    def message(self, text: str, last_id: int) -> list[int]:
        """See ``Renderer``."""
        return self._after_turn(self._chat.user(text), last_id)

    def text(self, sampled_ids: Sequence[int]) -> str:
        """See ``Renderer``."""
        ids = sampled_ids[:-1] if len(sampled_ids) and sampled_ids[-1] in self.stop_token_ids else sampled_ids
        return self.tokenizer.decode(ids)

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        """See ``Renderer``."""
        return parse_turn("<think>" + text if self._chat.opens_thinking else text, self._chat.syntax, tools)

    def _after_turn(self, turn: Sequence[str], last_id: int) -> list[int]:
        ids = [*self._close, *encode(turn, self.tokenizer, self.vision), *self.opening]
        return ids[1:] if ids[0] == last_id else ids

    def _encode_head(self, system: str, tools: str) -> tuple[int, ...]:
        return tuple(encode(self._chat.head(system, json.loads(tools)), self.tokenizer))
