"""Chat formats of Qwen 2.5 and Qwen 3, including VL models: ChatML, tools as JSON in the system turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.format import (
    TOOLS_HEAD,
    ImageMark,
    ModelFolder,
    NamedFormat,
    Pieces,
    Spoken,
    Unthought,
    illustrated,
    marker,
)
from megatron_fleet.models.chat.hermes import HERMES
from megatron_fleet.models.chat.parser import Tools
from megatron_fleet.models.chat.renderer import ToolResult, to_json
from megatron_fleet.models.qwen3.chat_template import EMPTY_THINKING, TOOLS_TAIL
from megatron_fleet.models.qwen3.tokens import IMAGE_PAD, QWEN3_TOKENS, VISION_TOKENS

_mark = marker(QWEN3_TOKENS.control + VISION_TOKENS + QWEN3_TOKENS.tags)


class Qwen:
    """Format of Qwen 3 with optional thinking (``hybrid``), and of non-thinking Qwen 2.5 and Qwen 3 Instruct 2507."""

    syntax = HERMES
    stops = QWEN3_TOKENS.stops
    close = _mark("<|im_end|>\n")
    past_opening = _mark("<|im_start|>assistant\n")
    unthought = Unthought(past_opening, strips=True)
    opens_thinking = False
    image = IMAGE_PAD

    def __init__(self, hybrid: bool, thinking: bool) -> None:
        self._thinking = thinking
        self.opening = self.past_opening + (_mark(EMPTY_THINKING) if hybrid and not thinking else ())
        self.template_arguments: dict[str, Any] = {"enable_thinking": thinking} if hybrid else {}

    def head(self, system: str, tools: Tools) -> Pieces:
        """The system turn, including the tools, if any."""
        head = (*_mark("<|im_start|>"), "system\n", system)
        if tools:
            block = "".join("\n" + to_json(t) for t in tools)
            head += ("\n\n", *_mark(TOOLS_HEAD), block, *_mark(TOOLS_TAIL))
        return head + self.close

    def user(self, text: str, images: Sequence[Image] = ()) -> Pieces:
        """A user turn."""
        return (*_mark("<|im_start|>"), "user\n", *illustrated(text, images, _image_block), *self.close)

    def results(self, results: Sequence[ToolResult]) -> Pieces:
        """A user turn with each result in ``<tool_response>``."""
        opened, closed = _mark("\n<tool_response>\n"), _mark("\n</tool_response>")
        blocks = [piece for r in results for piece in (*opened, *illustrated(r.text, r.images, _image_block), *closed)]
        return (*_mark("<|im_start|>"), "user", *blocks, *self.close)

    def spoken(self, turn: Spoken) -> str:
        """Thinking, text and calls, separated by line ends."""
        text = turn.content
        for call in turn.calls:
            body = f'{{"name": "{call.name}", "arguments": {to_json(call.arguments)}}}'
            text += ("\n" if text else "") + f"<tool_call>\n{body}\n</tool_call>"
        return f"<think>\n{turn.thinking}\n</think>\n\n{text}" if self._thinking else text

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        """The tools, unchanged."""
        return {"tools": list(tools) or None}


def _image_block(image: Image) -> Pieces:
    return (*_mark("<|vision_start|>"), ImageMark(IMAGE_PAD, image), *_mark("<|vision_end|>"))


FORMATS = {
    "qwen3": NamedFormat(QWEN3_TOKENS, (False, True), lambda thinking, template: Qwen(True, thinking)),
    "qwen3-instruct": NamedFormat(QWEN3_TOKENS, (False,), lambda thinking, template: Qwen(False, thinking)),
}


def recognise(folder: ModelFolder) -> str | None:
    """Name of the model folder's chat format; ``None`` if it is not one of this family."""
    template, thinks = folder.template, folder.has("<think>")
    if not folder.has_all(QWEN3_TOKENS.control):
        return None
    if template is None:
        return "qwen3" if thinks and not folder.model_type.startswith("qwen3_5") else None
    if not announces_json_calls(template):
        return None
    if "enable_thinking" in template:
        return "qwen3"
    return "qwen3-instruct" if thinks and "<think>" not in template else None


def announces_json_calls(template: str) -> bool:
    """Whether a chat template announces tools with JSON calls, as those of Qwen 2.5 and 3 do."""
    return "<tools>" in template and "<function=" not in template
