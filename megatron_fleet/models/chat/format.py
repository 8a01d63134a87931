"""Definition of a chat format: text and control tokens in the order the model was trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.parser import Syntax, Tools
from megatron_fleet.models.chat.tokenizer import AddedTokens, Tokenizer
from megatron_fleet.models.images import Vision, around, size_of

if TYPE_CHECKING:
    from megatron_fleet.models.chat.parser import ToolResult

TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
"""Tool announcement shared by the templates of several families."""


class Mark(str):
    """A control token or tag of a format: one id if the tokenizer has such a token, otherwise text."""


class ImageMark(Mark):
    """An image placeholder: repeated once per token of its image."""

    image: Image

    def __new__(cls, placeholder: str, image: Image) -> ImageMark:
        self = super().__new__(cls, placeholder)
        self.image = image
        return self


Pieces = tuple[str, ...]
"""Plain text and marks. Anything that is not a ``Mark`` never becomes a control token, whatever it spells."""


def marker(tokens: Sequence[str]) -> Callable[[str], Pieces]:
    """Build a function that splits a format's own text, never the user's, into pieces at ``tokens``."""
    pattern = re.compile("(" + "|".join(re.escape(t) for t in tokens) + ")")

    def mark(text: str) -> Pieces:
        return tuple(Mark(part) if i % 2 else part for i, part in enumerate(pattern.split(text)) if part)

    return mark


def illustrated(text: str, images: Sequence[Image], block: Callable[[Image], Pieces]) -> Pieces:
    """``text`` with the ``block`` of each image at its position."""
    first, *rest = around(text, len(images))
    return (first, *(piece for image, part in zip(images, rest, strict=True) for piece in (*block(image), part)))


def encode(pieces: Sequence[str], tokenizer: Tokenizer, vision: Vision | None = None) -> list[int]:
    """Encode ``pieces``; text between two tokens is encoded as a whole.

    Raises:
        ValueError: there is an image but no ``vision``, or an image cannot be read.
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
        raise ValueError("an image for a model without vision")
    return vision.tokens(*size_of(piece.image))


@dataclass(frozen=True, slots=True)
class Spoken:
    """The parts of an assistant turn. ``index``: conversation-wide number of its first call."""

    thinking: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Unthought:
    """Template text of an earlier turn whose thinking is dropped.

    Attributes:
        opening: replaces the turn's opening and its thinking.
        strips: line ends after the thinking are dropped too.
    """

    opening: Pieces
    strips: bool = False


class ChatFormat(Protocol):
    """Conversation format of one family.

    Attributes:
        syntax: tool-call syntax.
        stops: tokens that end an assistant turn; the tokenizer must have the first.
        close: template text after an assistant turn.
        opening: template text that begins an assistant turn to be sampled.
        past_opening: the same for a completed turn, where the template writes something else.
        unthought: the same for a turn whose thinking is dropped.
        opens_thinking: a sampled turn begins inside ``<think>``.
        template_arguments: arguments with which the model's own template produces this format.
        image: represents a part of an image; empty if the format does not support images yet.
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
        """Everything before the first user turn; identical for all tasks of an environment."""
        ...

    def user(self, text: str, images: Sequence[Image] = ()) -> Pieces:
        """A user turn; ``images`` as in ``ToolResult``."""
        ...

    def results(self, results: Sequence[ToolResult]) -> Pieces:
        """The results of a turn's tool calls."""
        ...

    def spoken(self, turn: Spoken) -> str:
        """Text of ``turn`` between ``opening`` and ``close``, as sampled by a policy that follows the template."""
        ...

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        """Arguments that pass ``tools`` to the model's own template."""
        ...


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A chat format that can be selected by name in rollout.renderer.

    Attributes:
        tokens: control tokens the tokenizer must have; tags are optional.
        thinking: values of rollout.thinking that its models support.
        make: builds the format from rollout.thinking and the model's own chat template, if there is one.
    """

    tokens: AddedTokens
    thinking: tuple[bool, ...]
    make: Callable[[bool, str | None], ChatFormat]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Properties of a model folder that distinguish a family's formats.

    Attributes:
        model_type: ``model_type`` of ``config.json``.
        template: the model's own chat template; ``None`` if it has none.
        has: whether the tokenizer has a given added token.
    """

    model_type: str
    template: str | None
    has: Callable[[str], bool]

    def has_all(self, tokens: Sequence[str]) -> bool:
        """Whether the tokenizer has all of ``tokens``."""
        return all(map(self.has, tokens))
