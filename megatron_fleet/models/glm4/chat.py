"""Chat formats of GLM 4.5 and 4.6 (parts on separate lines) and of GLM 4.7 (no line ends).

A turn ends where the next one begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.arguments import check_text, declared_properties, read_argument
from megatron_fleet.models.chat.format import TOOLS_HEAD, ModelFolder, NamedFormat, Pieces, Spoken, Unthought, marker
from megatron_fleet.models.chat.parser import BadCall, Syntax, ToolResult, Tools, WrittenCall
from megatron_fleet.models.chat.renderer import to_json
from megatron_fleet.models.chat.tokenizer import AddedTokens

TOKENS = AddedTokens(
    control=("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    tags=(
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    ),
    stops=("<|observation|>", "<|user|>", "<|endoftext|>"),
    pad="<|endoftext|>",
)
_CALL_HEAD = "For each function call, output the function name and arguments within the following XML format:\n"
_mark = marker(TOKENS.control + TOKENS.tags)
_NAME = re.compile(r"\s*([^\s<]+)\s*")
_KEY = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_CLOSE = re.compile(r"</tool_call>|\Z")
_SPACE = re.compile(r"\s*")
_VALUE_END = "</arg_value>"


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    """Read the tool's name, then a key and a value element for each argument.

    Strings are written verbatim, everything else as JSON, so the text alone does not distinguish ``"42"`` from ``42``.
    The tool's schema decides; where it does not specify a type, anything that parses as JSON is JSON.
    """
    name = _NAME.match(text, start)
    if name is None:
        raise BadCall("the tool's name must follow <tool_call>")
    properties = declared_properties(name[1], tools)
    arguments: dict[str, Any] = {}
    end = name.end()
    while key := _KEY.match(text, end):
        close = text.find(_VALUE_END, key.end())
        written = text[key.end() : close]
        if close < 0 or "<arg_value>" in written:
            raise BadCall(f"an <arg_value> is not closed with {_VALUE_END}")
        if key[1].strip() in arguments:
            raise BadCall(f"the argument {key[1].strip()!r} appears twice")
        arguments[key[1].strip()] = read_argument(written, properties.get(key[1].strip()))
        end = _SPACE.match(text, close + len(_VALUE_END)).end()  # type: ignore[union-attr]  # matches the empty string
    closing = _CLOSE.match(text, end)
    if closing is None:
        raise BadCall(
            "each argument must be <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>, and </tool_call> must follow"
        )
    check_text(name[1], arguments)
    return WrittenCall(ToolCall(name[1], arguments), "", closing.end())


GLM = Syntax("<tool_call>", "</tool_call>", _read, begins=r"^[^\s<]{1,200}\s{0,8}<arg_key>")


class Glm:
    """Format of GLM 4.5 to 4.7. ``compact``: GLM 4.7, which writes no line ends between the parts."""

    syntax = GLM
    stops = TOKENS.stops
    close: Pieces = ()
    image = ""

    def __init__(self, compact: bool, thinking: bool) -> None:
        self._line = line = "" if compact else "\n"
        self._thinking, self._compact = thinking, compact
        self.opens_thinking = compact and thinking
        if compact:
            opening = "<think>" if thinking else "</think>"
        else:
            opening = "" if thinking else "\n<think></think>"
        self.opening = self.past_opening = _mark("<|assistant|>" + opening)
        self.unthought = Unthought(_mark("<|assistant|>" + ("</think>" if compact else "\n<think></think>")))
        self.template_arguments: dict[str, Any] = {"enable_thinking": thinking}
        arguments = [
            f"<arg_key>{{arg-key-{i}}}</arg_key>{line}<arg_value>{{arg-value-{i}}}</arg_value>" for i in (1, 2)
        ]
        self._tail = line.join(["<tool_call>{function-name}", *arguments, "...", "</tool_call>"])

    def head(self, system: str, tools: Tools) -> Pieces:
        """A system turn for the tools, if any, and one for the text."""
        head = _mark("[gMASK]<sop>")
        if tools:
            block = "".join(to_json(t) + "\n" for t in tools)
            tail = "</tools>\n\n" + _CALL_HEAD + self._tail
            head += (*_mark("<|system|>\n" + TOOLS_HEAD + "\n"), block, *_mark(tail))
        return (*head, *_mark("<|system|>" + self._line), system)

    def user(self, text: str, images: Sequence[Image] = ()) -> Pieces:
        """A user turn; GLM 4.5 disables thinking here. No supported model takes ``images``."""
        quiet = not (self._thinking or self._compact or text.endswith("/nothink"))
        return (*_mark("<|user|>" + self._line), text, *_mark("/nothink" if quiet else ""))

    def results(self, results: Sequence[ToolResult]) -> Pieces:
        """One observation turn with each result in ``<tool_response>``."""
        opened = _mark(self._line + "<tool_response>" + self._line)
        closed = _mark(self._line + "</tool_response>")
        return (*_mark("<|observation|>"), *(piece for r in results for piece in (*opened, r.text, *closed)))

    def spoken(self, turn: Spoken) -> str:
        """Thinking, text and calls; string arguments are written verbatim, everything else as JSON."""
        line = self._line
        text = ("" if self._compact else "\n<think>") + turn.thinking + "</think>" if self._thinking else ""
        if turn.content:
            text += line + turn.content
        for call in turn.calls:
            text += f"{line}<tool_call>{call.name}{line}"
            for key, value in call.arguments.items():
                written = value if isinstance(value, str) else to_json(value)
                text += f"<arg_key>{key}</arg_key>{line}<arg_value>{written}</arg_value>{line}"
            text += "</tool_call>"
        return text

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        """The tools, unchanged."""
        return {"tools": list(tools) or None}


FORMATS = {
    "glm-4.5": NamedFormat(TOKENS, (False, True), lambda thinking, template: Glm(False, thinking)),
    "glm-4.7": NamedFormat(TOKENS, (False, True), lambda thinking, template: Glm(True, thinking)),
}


def recognise(folder: ModelFolder) -> str | None:
    """Name of the model folder's chat format; ``None`` if it is not one of this family."""
    if not folder.has_all(TOKENS.control):
        return None
    if folder.template is None:
        return {"glm4_moe": "glm-4.5", "glm4_moe_lite": "glm-4.7"}.get(folder.model_type)
    if re.search(r"\{function-name\}(\n|\\n)", folder.template):  # a line end, or one spelled in a string
        return "glm-4.5"
    return "glm-4.7" if "{function-name}<arg_key>" in folder.template else None
