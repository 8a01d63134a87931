"""Chat format of Qwen3-Coder: ChatML without thinking, tools described in XML, calls as those of Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.format import ModelFolder, NamedFormat, Pieces, Spoken, Unthought, marker
from megatron_fleet.models.chat.parser import ToolResult, Tools
from megatron_fleet.models.qwen3_5.chat import QWEN3_5, TOKENS, TOOLS_HEAD, TOOLS_TAIL, python_text, write_calls

_mark = marker(TOKENS.control + TOKENS.tags)


class Qwen3Coder:
    """Format of Qwen3-Coder."""

    syntax = QWEN3_5
    stops = TOKENS.stops
    close = _mark("<|im_end|>\n")
    opening = past_opening = _mark("<|im_start|>assistant\n")
    unthought = Unthought(opening)
    opens_thinking = False
    image = ""

    def __init__(self) -> None:
        self.template_arguments: dict[str, Any] = {}

    def head(self, system: str, tools: Tools) -> Pieces:
        """The system turn: the text, and the tools, if any."""
        head = (*_mark("<|im_start|>system\n"), system)
        if tools:
            block = "".join(_described(tool.get("function", tool)) for tool in tools)
            head += (*_mark("\n\n" + TOOLS_HEAD), block, *_mark(TOOLS_TAIL))
        return head + self.close

    def user(self, text: str, images: Sequence[Image] = ()) -> Pieces:
        """A user turn. The models see no ``images``."""
        return (*_mark("<|im_start|>user\n"), text, *self.close)

    def results(self, results: Sequence[ToolResult]) -> Pieces:
        """A user turn with each result in ``<tool_response>``."""
        opened, closed = _mark("<tool_response>\n"), _mark("\n</tool_response>\n")
        blocks = (piece for r in results for piece in (*opened, r.text, *closed))
        return (*_mark("<|im_start|>user\n"), *blocks, *self.close)

    def spoken(self, turn: Spoken) -> str:
        """Text and calls."""
        return write_calls(turn.content, turn.calls, python_text)

    def template_tools(self, tools: Tools) -> dict[str, Any]:
        """The tools, unchanged."""
        return {"tools": list(tools) or None}


def _described(tool: Mapping[str, Any]) -> str:
    """Return the elements of one tool; a schema's keys that have no place of their own follow under their names."""
    lines = ["", "<function>", f"<name>{tool.get('name', '')}</name>", *_trimmed(tool), "<parameters>"]
    schema = tool.get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    for name, declared in properties.items() if isinstance(properties, Mapping) else ():
        lines += ["<parameter>", f"<name>{name}</name>"]
        if isinstance(declared, Mapping):
            lines += [f"<type>{declared['type']}</type>"] if "type" in declared else []
            lines += [*_trimmed(declared), *_others(declared, "name", "type", "description")]
        lines.append("</parameter>")
    lines += [*_others(schema, "type", "properties"), "</parameters>"]
    lines += [*_others(tool, "type", "name", "description", "parameters"), "</function>"]
    return "\n".join(lines)


def _trimmed(described: Mapping[str, Any]) -> Iterator[str]:
    if "description" in described:
        yield f"<description>{str(described['description']).strip()}</description>"


def _others(value: Any, *known: str) -> Iterator[str]:
    """Yield an element for each key of the object ``value`` but the ``known`` ones."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if key not in known:
            yield f"<{key}>{python_text(inner)}</{key}>"


FORMATS = {"qwen3-coder": NamedFormat(TOKENS, (False,), lambda thinking, template: Qwen3Coder())}


def recognise(folder: ModelFolder) -> str | None:
    """Name of the model folder's chat format; ``None`` if it is not one of this family."""
    template = folder.template
    if template is None or not folder.has_all(TOKENS.control):
        return None
    return "qwen3-coder" if "<parameters>" in template and "<function=example_function_name>" in template else None
