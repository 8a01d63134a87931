"""Chat formats of Kimi K2, K2 Thinking and K2.5: role names between two tokens, tools in a separate turn."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.arguments import check_text, read_arguments, read_value
from megatron_fleet.models.chat.format import ModelFolder, NamedFormat, Pieces, Spoken, Unthought, marker
from megatron_fleet.models.chat.parser import BadCall, Syntax, ToolResult, Tools, WrittenCall
from megatron_fleet.models.chat.renderer import to_json
from megatron_fleet.models.chat.tokenizer import AddedTokens
from megatron_fleet.models.kimi.tool_types import declare, sorted_keys

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TOKENS = AddedTokens(
    control=("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    tags=(SECTION_BEGIN, SECTION_END, CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END, "<think>", "</think>"),
    stops=("<|im_end|>", "[EOS]"),
    pad="[EOS]",
)
Version = Literal["k2", "k2-thinking", "k2.5"]
_mark = marker(TOKENS.control + TOKENS.tags)
_HEAD = re.compile(r"([^<]*)" + re.escape(ARGUMENTS_BEGIN))
_CLOSE = re.compile(re.escape(CALL_END) + rf"|(?={re.escape(SECTION_END)})|\Z")
_EMPTY = re.compile(rf"\s*(?={re.escape(CALL_END)})")
_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)


def _read(text: str, start: int, tools: Tools) -> WrittenCall:
    """Read an id that contains the tool's name, then its arguments as JSON, between control tokens."""
    head = _HEAD.match(text, start)
    if head is None:
        raise BadCall(f"{ARGUMENTS_BEGIN} must follow the call's id")
    call_id = head[1].strip()
    name = _ID.fullmatch(call_id)[1].strip()  # type: ignore[index]  # the pattern matches any text
    if not name:
        raise BadCall("the call's id must be functions.NAME:NUMBER")
    empty = _EMPTY.match(text, head.end())
    value, end = (None, empty.end()) if empty else read_value(text, head.end())
    close = _CLOSE.match(text, end)
    if close is None:
        raise BadCall(f"there is text between the JSON object and {CALL_END}")
    arguments = read_arguments(value)
    check_text(call_id, arguments)
    return WrittenCall(ToolCall(name, arguments), call_id, close.end())


_BEGINS = r"functions\.[^<\s]{1,200}\s{0,8}" + re.escape(ARGUMENTS_BEGIN)

KIMI = Syntax(CALL_BEGIN, CALL_END, _read, around=(SECTION_BEGIN, SECTION_END), begins=_BEGINS)


class Kimi:
    """Format of Kimi K2 (never thinks), K2 Thinking (always) and K2.5 (optional; tools as TypeScript declarations).

    ``spaced``: the tools' JSON has spaces between its items, as in the first published templates.
    """

    syntax = KIMI
    stops = TOKENS.stops
    close = _mark("<|im_end|>")
    image = ""

    def __init__(self, version: Version, thinking: bool, spaced: bool = False) -> None:
        self._version, self._thinking = version, thinking
        self._separators = (", ", ": ") if spaced else (",", ":")
        self.opens_thinking = version == "k2.5" and thinking
        opening = "" if version != "k2.5" else "<think>" if thinking else "<think></think>"
        turn = "<|im_assistant|>assistant<|im_middle|>"
        self.opening = self.past_opening = _mark(turn + opening)
        self.unthought = Unthought(_mark(turn + ("" if version == "k2" else "<think></think>")))
        self.template_arguments: dict[str, Any] = {"thinking": thinking} if version == "k2.5" else {}

    def head(self, system: str, tools: Tools) -> Pieces:
        """The tools' turn, if there are tools, and the system turn."""
        head = self._turn("<|im_system|>", "tool_declare", self._declaration(tools)) if tools else ()
        return head + self._turn("<|im_system|>", "system", system)

    def user(self, text: str, images: Sequence[Image] = ()) -> Pieces:
        """A user turn; ``images`` are not supported yet."""
        return self._turn("<|im_user|>", "user", text)

    def results(self, results: Sequence[ToolResult]) -> Pieces:
        """One turn per result, naming the tool and the call."""
        turns: Pieces = ()
        for r in results:
            call_id = r.call_id or _call_id(r.name or "unknown", r.index)
            turns += self._turn("<|im_system|>", r.name or "tool", f"## Return of {call_id}\n{r.text}")
        return turns

    def spoken(self, turn: Spoken) -> str:
        """Thinking, text and one section with all calls."""
        text = turn.content
        if turn.calls:
            calls = (
                f"{CALL_BEGIN}{_call_id(c.name, turn.index + i)}{ARGUMENTS_BEGIN}{to_json(c.arguments)}{CALL_END}"
                for i, c in enumerate(turn.calls)
            )
            text += SECTION_BEGIN + "".join(calls) + SECTION_END
        if not self._thinking:
            return text
        return ("" if self.opens_thinking else "<think>") + f"{turn.thinking}</think>{text}"

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        """The tools as the model's tokenizer passes them to the template: with sorted keys, and as declarations."""
        ordered = sorted_keys(list(tools)) or None
        return {"tools": ordered, "tools_ts_str": declare(ordered) if ordered and self._version == "k2.5" else None}

    def _declaration(self, tools: Tools) -> str:
        declared = declare(tools) if self._version == "k2.5" else None
        return declared or json.dumps(sorted_keys(list(tools)), ensure_ascii=False, separators=self._separators)

    def _turn(self, role: str, name: str, text: str) -> Pieces:
        return (*_mark(role), name, *_mark("<|im_middle|>"), text, *self.close)


def _call_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


def _spaced(template: str | None) -> bool:
    return template is not None and "separators" not in template


FORMATS = {
    "kimi-k2": NamedFormat(TOKENS, (False,), lambda thinking, t: Kimi("k2", thinking, _spaced(t))),
    "kimi-k2-thinking": NamedFormat(TOKENS, (True,), lambda thinking, t: Kimi("k2-thinking", thinking, _spaced(t))),
    "kimi-k2.5": NamedFormat(TOKENS, (False, True), lambda thinking, t: Kimi("k2.5", thinking, _spaced(t))),
}


def recognise(folder: ModelFolder) -> str | None:
    """Name of the model folder's chat format; ``None`` if it is not one of this family."""
    if not folder.has_all(TOKENS.control):
        return None
    if folder.template is None:
        return "kimi-k2.5" if folder.model_type == "kimi_k25" else "kimi-k2"
    if "tools_ts_str" in folder.template:
        return "kimi-k2.5"
    return "kimi-k2-thinking" if "<think>" in folder.template else "kimi-k2"
