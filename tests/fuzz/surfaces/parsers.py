"""Texts of a policy in each syntax of tool calls, and messages of an endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fuzz.engine import Surface
from fuzz.trees import received

from megatron_fleet.agents.chat_turn import ToolNames, read_turn
from megatron_fleet.models.chat.parser import MAX_CALLS, ParsedTurn, parse_turn
from megatron_fleet.models.glm4.chat import GLM
from megatron_fleet.models.kimi.chat import KIMI
from megatron_fleet.models.qwen3.chat import HERMES
from megatron_fleet.models.qwen3_5.chat import QWEN3_5

SYNTAXES = {"hermes": HERMES, "glm": GLM, "kimi": KIMI, "qwen3.5": QWEN3_5}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": ["integer", "null"]}}}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": SCHEMA}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
TEXTS = {
    "hermes": "<think>\nhm\n</think>\n\nok <tool_call>\n"
    '{"name": "find", "arguments": {"q": "x", "n": 3}}\n</tool_call>',
    "glm": "thought</think><tool_call>find\n<arg_key>q</arg_key>\n<arg_value>42</arg_value>\n"
    "<arg_key>n</arg_key><arg_value>[1, 2]</arg_value></tool_call> end <done>",
    "kimi": "a<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
    '{"q": "é"}<|tool_call_end|><|tool_calls_section_end|>',
    "qwen3.5": "ok\n\n<tool_call>\n<function=find>\n<parameter=q>\nx\ny\n</parameter>\n<parameter=n>\nNone\n"
    "</parameter>\n</function>\n</tool_call>",
}


def seeds() -> list[Any]:
    texts = [{"syntax": name, "text": text, "tools": tools} for name, text in TEXTS.items() for tools in (TOOLS, [])]
    answers = [{"syntax": name, "text": "the answer <done>", "tools": []} for name in SYNTAXES]
    messages = [
        {"message": {"role": "assistant", "content": "hm", "reasoning_content": "r", "tool_calls": [CALL, CALL]}},
        {"message": {"role": "assistant", "content": [{"type": "text", "text": "a <done>"}], "refusal": None}},
    ]
    return [*texts, *answers, *messages]


def check(tree: Any, folder: Path) -> bool:
    tree = received(tree)
    tree = tree if isinstance(tree, dict) else {}
    message = tree.get("message")
    if isinstance(message, dict):
        turn = read_turn(message, 3, return_reasoning=True, names=ToolNames(()))
        _check(turn.parsed)
        json.dumps(turn.message)
        told = turn.message.get("tool_calls") or []
        assert len({call["id"] for call in told}) == len(told) == len(turn.parsed.tool_calls) + len(turn.error_ids)
        return True
    syntax, text, tools = SYNTAXES.get(str(tree.get("syntax"))), tree.get("text"), tree.get("tools")
    if syntax is None or not isinstance(text, str):
        return False
    offered = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    _check(parse_turn(text, syntax, offered))
    return True


def _check(parsed: ParsedTurn) -> None:
    assert len(parsed.tool_calls) <= MAX_CALLS and len(parsed.call_ids) in (0, len(parsed.tool_calls))
    for call in parsed.tool_calls:
        assert call.name and isinstance(call.arguments, dict)
        json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()
    assert parsed.final_answer is None or not parsed.tool_calls
    assert all(isinstance(error, str) and error.endswith(".") and len(error) < 3000 for error in parsed.errors)


WORDS = (*SYNTAXES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", '{"name": "find"')
SURFACE = Surface(
    "parsers", 5000, seeds, check, (*WORDS, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "```json", "```")
)
