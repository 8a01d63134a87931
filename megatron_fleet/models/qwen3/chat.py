"""Chat formats of Qwen 2.5 and Qwen 3, including VL models: ChatML, tools and calls as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.arguments import check_text, read_arguments, read_value
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
from megatron_fleet.models.chat.parser import BadCall, Syntax, ToolResult, Tools, WrittenCall
from megatron_fleet.models.chat.renderer import to_json
from megatron_fleet.models.chat.tokenizer import AddedTokens

TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
EMPTY_THINKING = "<think>\n\n</think>\n\n"

_CALLS = r"""
{%- macro calls(message, after_text) %}
    {%- for call in message.tool_calls or [] %}
        {%- set f = call.function or call %}
        {{- '\n' if after_text or not loop.first }}
        {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}
        {{- f.arguments if f.arguments is string else f.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
"""

# With tools, the system turn exists even without a system message.
_SYSTEM = r"""
{%- set leading = messages[0].role == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {{- messages[0].content + '\n\n' if leading }}
    {{- TOOLS_HEAD }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- TOOLS_TAIL + '<|im_end|>\n' }}
{%- elif leading %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""

# Thinking survives only after the last real question; a user turn that wraps a tool response does not count.
_LAST_QUESTION = r"""
{%- set ns = namespace(question=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' and m.content is string
           and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
        {%- set ns.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if ns.question < 0 %}
    {%- set ns.question = messages | length - 1 %}
{%- endif %}
"""

_TURNS = r"""
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thinking = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if m.reasoning_content is not string and '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.question and (loop.last or thinking) %}
            {{- '<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- calls(m, content) + '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- EMPTY_THINKING if enable_thinking is defined and enable_thinking is false }}
{%- endif %}
"""

QWEN3_CHAT_TEMPLATE = (
    "".join(
        "{%- set " + name + " = " + json.dumps(value) + " %}\n"
        for name, value in (("TOOLS_HEAD", TOOLS_HEAD), ("TOOLS_TAIL", TOOLS_TAIL), ("EMPTY_THINKING", EMPTY_THINKING))
    )
    + (_CALLS + _SYSTEM + _LAST_QUESTION + _TURNS).strip()
)
"""The format as a Jinja template, for the tokenizer folders that we create ourselves.

It renders the same text as the template published with the Qwen3 models (thinking and non-thinking), so that
``transformers`` and vLLM can chat with our models and the renderer can be checked against ``apply_chat_template``.
"""

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE_PAD, VIDEO_PAD)

QWEN3_TOKENS = AddedTokens(
    control=(END_OF_TEXT, IM_START, IM_END),
    tags=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    stops=(IM_END, END_OF_TEXT),
    pad=END_OF_TEXT,
    chat_template=QWEN3_CHAT_TEMPLATE,
)

QWEN_VL_TOKENS = replace(
    QWEN3_TOKENS,
    control=(*QWEN3_TOKENS.control, *VISION_TOKENS),
    chat_template=None,
)
"""Vision tokens of Qwen2-VL to Qwen3-VL, whose templates come with the models."""

_mark = marker(QWEN3_TOKENS.control + VISION_TOKENS + QWEN3_TOKENS.tags)
_CLOSE = re.compile(r"</tool_call>|\Z")


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    value, end = read_value(text, start)
    close = _CLOSE.match(text, end)
    if close is None:
        raise BadCall("there is text between the JSON object and </tool_call>")
    if not isinstance(value, dict):
        raise BadCall('the JSON must be an object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise BadCall('"name" is missing')
    if "arguments" not in value:
        raise BadCall('"arguments" is missing')
    arguments = read_arguments(value["arguments"])
    check_text(name, arguments)
    return WrittenCall(ToolCall(name.strip(), arguments), "", close.end())


_BEGINS = r'^[ \t]*\{\s*"name"\s*:\s*"[^"\n]*"\s*,\s*"arguments"\s*:'

HERMES = Syntax("<tool_call>", "</tool_call>", _read, begins=_BEGINS)
"""A JSON object in ``<tool_call>``, as in Hermes."""


class Qwen:
    """Format of Qwen 3 with optional thinking (``hybrid``), and of non-thinking Qwen 2.5 and Qwen 3 Instruct 2507.

    ``opens_thinking``: Qwen 3 Thinking 2507, whose sampled turns begin inside ``<think>``.
    """

    syntax = HERMES
    stops = QWEN3_TOKENS.stops
    close = _mark("<|im_end|>\n")
    unthought = Unthought(_mark("<|im_start|>assistant\n"), strips=True)
    image = IMAGE_PAD

    def __init__(self, hybrid: bool, thinking: bool, opens_thinking: bool = False) -> None:
        self._thinking, self.opens_thinking = thinking, opens_thinking
        self.past_opening = _mark("<|im_start|>assistant\n" + ("<think>\n" if opens_thinking else ""))
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
        if not self._thinking:
            return text
        return ("" if self.opens_thinking else "<think>\n") + f"{turn.thinking}\n</think>\n\n{text}"

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        """The tools, unchanged."""
        return {"tools": list(tools) or None}


def _image_block(image: Image) -> Pieces:
    return (*_mark("<|vision_start|>"), ImageMark(IMAGE_PAD, image), *_mark("<|vision_end|>"))


FORMATS = {
    "qwen3": NamedFormat(QWEN3_TOKENS, (False, True), lambda thinking, template: Qwen(True, thinking)),
    "qwen3-instruct": NamedFormat(QWEN3_TOKENS, (False,), lambda thinking, template: Qwen(False, thinking)),
    "qwen3-thinking": NamedFormat(QWEN3_TOKENS, (True,), lambda thinking, template: Qwen(False, True, True)),
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
    if "<think>" in template.rpartition("add_generation_prompt")[2]:
        return "qwen3-thinking"
    return ("qwen3" if "<think>" in template else "qwen3-instruct") if thinks else None


def announces_json_calls(template: str) -> bool:
    """Whether a chat template announces tools with JSON calls, as those of Qwen 2.5 and 3 do."""
    return "<tools>" in template and "<function=" not in template
