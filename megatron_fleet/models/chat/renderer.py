"""What the episode loop may know of a model's chat format: token ids in, token ids out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.parser import ParsedTurn, Tools
from megatron_fleet.models.chat.tokenizer import Tokenizer
from megatron_fleet.models.images import Vision


def to_json(value: Any) -> str:
    """JSON as the templates' ``tojson`` writes it: unescaped Unicode, ``", "`` and ``": "`` between items."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the policy is shown for one tool call of its last turn.

    Attributes:
        name: of the tool; empty for a call that could not be read.
        text: the result, or the sentence that says what went wrong.
        index: of the call in the episode, from 0; unreadable calls count too.
        call_id: as the policy wrote it (``ParsedTurn.call_ids``); empty where the syntax has none.
        images: in the order of their places ``[image n]`` in ``text``, n from 1; those without a place follow it.
    """

    name: str
    text: str
    index: int
    call_id: str = ""
    images: tuple[Image, ...] = ()


class Renderer(Protocol):
    """One model family's conversation format. Holds no conversation, so all episodes of a process share one.

    Attributes:
        tokenizer: the model's own.
        stop_token_ids: tokens that end an assistant turn.
        vision: how images become tokens; ``None``: the model sees none, and no image may be given.
        opening: ids that every prompt ends with: the next turn's beginning.
        unthought: ids that stand in its place, and in that of the thinking, in a turn whose thinking is left out.
        strips_unthought: line ends behind that thinking are left out too.
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
        """Ids of the first prompt: system text, tool definitions (OpenAI function format), question, opened answer.

        ``images``: shown with the question, as ``ToolResult.images`` are with a result.
        """
        ...

    def observation(self, results: Sequence[ToolResult], last_id: int) -> list[int]:
        """Ids that follow a sampled turn: its end, the results in order of the calls, the next turn opened.

        ``last_id`` is the last sampled id; a turn that did not end itself is ended here.
        """
        ...

    def message(self, text: str, last_id: int) -> list[int]:
        """Like ``observation``, for a plain user turn."""
        ...

    def text(self, sampled_ids: Sequence[int]) -> str:
        """Text of a sampled turn without the stop token that ended it."""
        ...

    def parse(self, text: str, tools: Tools = ()) -> ParsedTurn:
        """What a sampled turn says, in the family's tool-call syntax; never raises.

        ``tools`` are the definitions that the policy was offered: some formats do not tell ``"42"`` from ``42``.
        """
        ...
