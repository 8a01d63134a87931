"""A chat format of your own: `mfleet train rollout.renderer=my_renderer:make` (see README.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.arguments import check_text, read_arguments, read_value
from megatron_fleet.models.chat.format import Pieces, Spoken, Unthought, marker
from megatron_fleet.models.chat.parser import BadCall, Syntax, Tools, WrittenCall
from megatron_fleet.models.chat.renderer import ChatRenderer, Renderer, ToolResult, to_json
from megatron_fleet.models.chat.tokenizer import Tokenizer

NAME = re.compile(r"\s*([\w.-]+)\s*")
CLOSE = re.compile(r"</call>|\Z")
mark = marker(("<|im_start|>", "<|im_end|>"))


def read(text: str, start: int, tools: Tools) -> WrittenCall:
    """The call at `start`: the tool's name, then its arguments as a JSON object. Raises BadCall."""
    name = NAME.match(text, start)
    if name is None:
        raise BadCall("the name of the tool is missing")
    value, end = read_value(text, name.end())
    arguments = read_arguments(value)
    check_text(arguments)
    close = CLOSE.match(text, end)
    if close is None:
        raise BadCall("there is text between the arguments and </call>")
    return WrittenCall(ToolCall(name[1], arguments), "", close.end())


class NamedCalls:
    """ChatML whose tool calls read `<call>name {"argument": 1}</call>`; see `ChatFormat` for the members."""

    syntax = Syntax("<call>", "</call>", read)
    stops = ("<|im_end|>",)
    close = mark("<|im_end|>\n")
    opening = past_opening = mark("<|im_start|>assistant\n")
    unthought = Unthought(past_opening)
    opens_thinking = False
    template_arguments: ClassVar[dict[str, Any]] = {}

    def head(self, system: str, tools: Tools) -> Pieces:
        listed = "".join(f"\n{to_json(tool['function'])}" for tool in tools)
        how = '\n\nCall a tool by <call>name {"argument": 1}</call>. Tools:' if tools else ""
        return (*mark("<|im_start|>system\n"), f"{system}{how}{listed}", *self.close)

    def user(self, text: str, images: Sequence[Image] = ()) -> Pieces:
        return (*mark("<|im_start|>user\n"), text, *self.close)

    def results(self, results: Sequence[ToolResult]) -> Pieces:
        return (*mark("<|im_start|>tool\n"), "\n".join(result.text for result in results), *self.close)

    def spoken(self, turn: Spoken) -> str:
        calls = (f"<call>{call.name} {to_json(call.arguments)}</call>" for call in turn.calls)
        return "\n".join((*([turn.content] if turn.content else []), *calls))

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        return {"tools": list(tools) or None}


def make(folder: Path, thinking: bool) -> Renderer:
    """The renderer for the model in `folder`.

    Args:
        folder: with the tokenizer's files.
        thinking: rollout.thinking; this format has no place for it.
    """
    return ChatRenderer(Tokenizer(folder), NamedCalls())
