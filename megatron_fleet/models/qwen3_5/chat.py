"""Chat format of Qwen3.5 and 3.6: ChatML, tools before the system text, calls in XML, trimmed texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.arguments import check_text, declared_properties, read_argument
from megatron_fleet.models.chat.format import (
    ImageMark,
    Mark,
    ModelFolder,
    NamedFormat,
    Pieces,
    Spoken,
    Unthought,
    illustrated,
    marker,
)
from megatron_fleet.models.chat.parser import BadCall, Syntax, ToolResult, Tools, WrittenCall
from megatron_fleet.models.chat.renderer import to_json
from megatron_fleet.models.qwen3.chat import IMAGE_PAD, QWEN3_TOKENS, VISION_TOKENS

TOKENS = replace(QWEN3_TOKENS, chat_template=None)
_mark = marker(TOKENS.control + VISION_TOKENS + TOKENS.tags)
TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
_EXAMPLE = (
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    f"{_EXAMPLE}\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT "
    "after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not "
    "tell the user about function calls\n</IMPORTANT>"
)
EMPTY_THINKING = "<think>\n\n</think>\n\n"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_VALUE_END = "</parameter>"
_SPACE = re.compile(r"\s*")
_CLOSE = re.compile(r"</function>\s*(?:</tool_call>|\Z)")


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    """Read one element for the function and one per parameter, values as text."""
    function = _FUNCTION.match(text, start)
    name = function[1].strip() if function else ""
    if function is None or not name:
        raise BadCall("<function=NAME> must follow <tool_call>")
    properties = declared_properties(name, tools)
    arguments: dict[str, Any] = {}
    end = function.end()
    while parameter := _PARAMETER.match(text, end):
        key = parameter[1].strip()
        close = text.find(_VALUE_END, parameter.end())
        written = text[parameter.end() : close].removesuffix("\n")
        if close < 0 or "<parameter=" in written:
            raise BadCall(f"the parameter {key!r} is not closed with {_VALUE_END}")
        if key in arguments:
            raise BadCall(f"the parameter {key!r} appears twice")
        arguments[key] = read_argument(written, properties.get(key), python_words=True)
        end = _SPACE.match(text, close + len(_VALUE_END)).end()  # type: ignore[union-attr]  # matches the empty string
    closing = _CLOSE.match(text, end)
    if closing is None:
        raise BadCall(
            "each argument must be <parameter=NAME>VALUE</parameter>, and </function></tool_call> must follow"
        )
    check_text(name, arguments)
    return WrittenCall(ToolCall(name, arguments), "", closing.end())


QWEN3_5 = Syntax("<tool_call>", "</tool_call>", _read, begins=r"^[ \t]*<function=")


def write_calls(content: str, calls: Sequence[ToolCall], write: Callable[[Any], str]) -> str:
    """Return ``content`` and ``calls`` as `QWEN3_5` reads them; ``write`` converts an argument to text."""
    text = content
    for number, call in enumerate(calls):
        text += "\n" if number else "\n\n" if text.strip() else ""
        values = ((key, write(value)) for key, value in call.arguments.items())
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
        text += f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"
    return text


def python_text(value: Any) -> str:
    """Convert ``value`` as Jinja's ``string`` does; lists and objects to JSON."""
    return to_json(value) if isinstance(value, dict | list) else str(value)


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


class Qwen35:
    """Format of Qwen3.5 and 3.6, and of 3.8 at its medium reasoning effort.

    ``json_scalars``: 3.6, which writes numbers, booleans and null as JSON instead of Python literals.
    """

    syntax = QWEN3_5
    stops = TOKENS.stops
    close = _mark("<|im_end|>\n")
    unthought = Unthought(_mark("<|im_start|>assistant\n"), strips=True)
    image = IMAGE_PAD

    def __init__(self, thinking: bool, json_scalars: bool) -> None:
        self._thinking, self._write = thinking, _json_text if json_scalars else python_text
        self.opens_thinking = thinking
        opening = "<|im_start|>assistant\n" + ("<think>\n" if thinking else EMPTY_THINKING)
        self.opening = self.past_opening = _mark(opening)
        # The last two are read by the template of 3.8: without them it adds a system text and keeps empty thinking.
        arguments = {"enable_thinking": thinking, "reasoning_effort": "medium", "preserve_thinking": False}
        self.template_arguments: dict[str, Any] = arguments

    def head(self, system: str, tools: Tools) -> Pieces:
        """The system turn: the tools, if any, and the text."""
        text = system.strip()
        if not tools:
            return (*_mark("<|im_start|>system\n"), text, *self.close)
        block = "".join("\n" + to_json(tool) for tool in tools)
        head = (*_mark("<|im_start|>system\n" + TOOLS_HEAD), block, *_mark(TOOLS_TAIL))
        return (*head, *(("\n\n" + text,) if text else ()), *self.close)

    def user(self, text: str, images: Sequence[Image] = ()) -> Pieces:
        """A user turn."""
        return (*_mark("<|im_start|>user\n"), *_trimmed(illustrated(text, images, _image_block)), *self.close)

    def results(self, results: Sequence[ToolResult]) -> Pieces:
        """A user turn with each result in ``<tool_response>``."""
        opened, closed = _mark("\n<tool_response>\n"), _mark("\n</tool_response>")
        shown = [_trimmed(illustrated(r.text, r.images, _image_block)) for r in results]
        return (*_mark("<|im_start|>user"), *(p for s in shown for p in (*opened, *s, *closed)), *self.close)

    def spoken(self, turn: Spoken) -> str:
        """Thinking, text and calls."""
        text = write_calls(turn.content, turn.calls, self._write)
        return f"{turn.thinking.strip()}\n</think>\n\n{text}" if self._thinking else text

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        """The tools, unchanged."""
        return {"tools": list(tools) or None}


def _image_block(image: Image) -> Pieces:
    return (*_mark("<|vision_start|>"), ImageMark(IMAGE_PAD, image), *_mark("<|vision_end|>"))


def _trimmed(pieces: Pieces) -> Pieces:
    """Strip whitespace at both ends, as the template trims each message."""
    out = list(pieces)
    while out and not isinstance(out[0], Mark) and (stripped := out[0].lstrip()) != out[0]:
        out[:1] = [stripped] if stripped else []
    while out and not isinstance(out[-1], Mark) and (stripped := out[-1].rstrip()) != out[-1]:
        out[-1:] = [stripped] if stripped else []
    return tuple(out)


def _make(thinking: bool, template: str | None) -> Qwen35:
    # The template of 3.5 converts anything but text, lists and objects to text; that of 3.6 writes JSON.
    python = template is None or "<function=" not in template or re.search(r"\belse\s+\w+\s*\|\s*string\b", template)
    return Qwen35(thinking, json_scalars=not python)


FORMATS = {"qwen3.5": NamedFormat(TOKENS, (False, True), _make)}


def recognise(folder: ModelFolder) -> str | None:
    """Name of the model folder's chat format; ``None`` if it is not one of this family."""
    if not folder.has_all(TOKENS.control):
        return None
    if folder.template is None:
        return "qwen3.5" if folder.model_type.startswith("qwen3_5") else None
    known = "<function=example_function_name>" in folder.template and "enable_thinking" in folder.template
    return "qwen3.5" if known else None
