"""Interface of a model's chat format for the episode loop: token ids in, token ids out."""

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
    """Serialise as the templates' ``tojson`` does: unescaped Unicode, ``", "`` and ``": "`` as separators."""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of one tool call of the last turn, as shown to the policy.

    Attributes:
        name: tool name; empty for a call that could not be read.
        text: the result, or a sentence describing the error.
        index: 0-based number of the call in the episode; unreadable calls count too.
        call_id: id the policy wrote (``ParsedTurn.call_ids``); empty if the syntax has none.
        images: in the order of their positions ``[image n]`` in ``text``, n from 1; those without a position follow it.
    """

    name: str
    text: str
    index: int
    call_id: str = ""
    images: tuple[Image, ...] = ()


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
