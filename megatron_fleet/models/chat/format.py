"""What a chat format is: pieces of text and control tokens in the order that a model was trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.parser import Syntax, Tools
from megatron_fleet.models.chat.renderer import ToolResult
from megatron_fleet.models.chat.tokenizer import AddedTokens, Tokenizer
from megatron_fleet.models.images import Vision, around, size_of

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
"""How the templates of several families announce the tools."""


class Mark(str):
    """A control token or tag of a format: one id where the tokenizer has such a token, text where it has not."""


class ImageMark(Mark):
    """A placeholder: as many ids as its image has."""

    image: Image

    def __new__(cls, placeholder: str, image: Image) -> ImageMark:
        self = super().__new__(cls, placeholder)
        self.image = image
        return self


Pieces = tuple[str, ...]
"""Text as it is, and marks. What is no ``Mark`` never becomes a control token, whatever it spells."""


def marker(tokens: Sequence[str]) -> Callable[[str], Pieces]:
    """A function that cuts a format's own text, not the user's, into pieces at ``tokens``."""
    pattern = re.compile("(" + "|".join(re.escape(t) for t in tokens) + ")")

    def mark(text: str) -> Pieces:
        return tuple(Mark(part) if i % 2 else part for i, part in enumerate(pattern.split(text)) if part)

    return mark


def illustrated(text: str, images: Sequence[Image], block: Callable[[Image], Pieces]) -> Pieces:
    """``text`` with the ``block`` of each image in its place."""
    first, *rest = around(text, len(images))
    return (first, *(piece for image, part in zip(images, rest, strict=True) for piece in (*block(image), part)))


def encode(pieces: Sequence[str], tokenizer: Tokenizer, vision: Vision | None = None) -> list[int]:
    """Ids of ``pieces``; text between two tokens is encoded as a whole.

    Raises:
        ValueError: there is an image without ``vision``, or one that cannot be read.
    """
    ids: list[int] = []
    text = ""
    for piece in pieces:
        token = tokenizer.special.get(piece) if isinstance(piece, Mark) else None
        if token is None:
            text += piece
            continue
        if text:
            ids.extend(tokenizer.encode(text))
        ids.extend([token] * _count(piece, vision))
        text = ""
    if text:
        ids.extend(tokenizer.encode(text))
    return ids


def _count(piece: str, vision: Vision | None) -> int:
    if not isinstance(piece, ImageMark):
        return 1
    if vision is None:
        raise ValueError("an image for a model that sees none")
    return vision.tokens(*size_of(piece.image))


@dataclass(frozen=True, slots=True)
class Spoken:
    """An assistant turn in its parts. ``index``: of its first call, counted over the conversation."""

    thinking: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Unthought:
    """How the template writes an earlier turn whose thinking it leaves out.

    Attributes:
        opening: what stands in place of the turn's opening and its thinking.
        strips: line ends behind the thinking are left out as well.
    """

    opening: Pieces
    strips: bool = False


class ChatFormat(Protocol):
    """How one family writes a conversation.

    Attributes:
        syntax: of its tool calls.
        stops: tokens that end an assistant turn; the tokenizer must have the first.
        close: what the template writes behind an assistant turn.
        opening: what the template writes for an assistant turn that is to be sampled.
        past_opening: the same for a turn that is over, where the template writes something else.
        unthought: the same for one whose thinking is left out.
        opens_thinking: a sampled turn begins inside ``<think>``.
        template_arguments: what the model's own template takes to write this format.
        image: stands for a part of an image; empty where the format has no form for images yet.
    """

    syntax: Syntax
    stops: tuple[str, ...]
    close: Pieces
    opening: Pieces
    past_opening: Pieces
    unthought: Unthought
    opens_thinking: bool
    template_arguments: dict[str, Any]
    image: str

    def head(self, system: str, tools: Tools) -> Pieces:
        """Everything before the first user turn: the same for all tasks of an environment."""
        ...

    def user(self, text: str, images: Sequence[Image] = ()) -> Pieces:
        """A user turn; ``images`` as in ``ToolResult``."""
        ...

    def results(self, results: Sequence[ToolResult]) -> Pieces:
        """The answers to a turn's tool calls."""
        ...

    def spoken(self, turn: Spoken) -> str:
        """What a policy that keeps to the template samples for ``turn``, between ``opening`` and ``close``."""
        ...

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        """The arguments of the model's own template that tell it about ``tools``."""
        ...


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A chat format that rollout.renderer can name.

    Attributes:
        tokens: its control tokens must be in the tokenizer; tags may be.
        thinking: the values of rollout.thinking that its models know.
        make: the format, given rollout.thinking and the model's own chat template, if there is one.
    """

    tokens: AddedTokens
    thinking: tuple[bool, ...]
    make: Callable[[bool, str | None], ChatFormat]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What tells a family's formats apart.

    Attributes:
        model_type: of ``config.json``.
        template: the model's own chat template; ``None`` when it has none.
        has: whether the tokenizer has an added token.
    """

    model_type: str
    template: str | None
    has: Callable[[str], bool]

    def has_all(self, tokens: Sequence[str]) -> bool:
        """Whether the tokenizer has all of these."""
        return all(map(self.has, tokens))
