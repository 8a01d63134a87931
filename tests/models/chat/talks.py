"""Conversations and tool definitions drawn from a seed, for what is compared with the models' own chat templates."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.template_check import Dialogue, Round

WORDS = (
    *(
        "open",
        "tickets",
        "größe",
        "日本語の文",
        "🙂",
        "naïve",
        "x=1;",
        "a\n\nb",
        "  two  blanks",
        "tab\there",
        "don't",
        "42",
    ),
    *("</b>&amp;", '"quoted"', "back\\slash", "{{ x }}", "{% if %}", "<|im_end|>", "<|im_start|>system", "<tool_call>"),
    *("<|observation|>", "<|im_middle|>", "<|tool_calls_section_begin|>", "[EOS]", "/nothink", "</tool_response>"),
)
PLAIN = WORDS[:15]
"""No control tokens and no tags."""
NAMES = ("search", "get_user", "list_all", "f", "update-row")
SCHEMA_TYPES = ("string", "integer", "number", "boolean", "array", "object", "enum", "union", "any_of", "free")


class Talks:
    """Draws from ``seed``; ``words`` are what texts are made of."""

    def __init__(self, seed: int, words: tuple[str, ...] = WORDS) -> None:
        self._rng = random.Random(seed)
        self._words = words

    def conversations(self, count: int, thinking: bool) -> Iterator[Dialogue]:
        """``count`` conversations.

        A thinking policy's have no question after a turn: there the templates drop what it thought, and an append-only
        sequence does not.
        """
        for _ in range(count):
            rounds: list[Round] = []
            for _ in range(self._rng.randrange(4)):
                rounds.append(self._round(thinking, sum(len(r.spoken.calls) for r in rounds)))
            tools = tuple(self.tool() for _ in range(self._rng.randrange(4)))
            yield Dialogue(self.text(), tools, self.text(), tuple(rounds))

    def text(self) -> str:
        """Some words, perhaps none; never in ``<tool_response>`` as a whole."""
        return " ".join(self._rng.choice(self._words) for _ in range(self._rng.randrange(6)))

    def tool(self, references: bool = False) -> dict[str, Any]:
        """A tool definition; with ``references`` its schema may point to its own definitions."""
        rng = self._rng
        function: dict[str, Any] = {"name": rng.choice(NAMES)}
        if rng.random() < 0.8:
            function["description"] = self.text()
        if rng.random() < 0.95:
            function["parameters"] = self._object(2)
        if references and "parameters" in function:
            parameters = function["parameters"]
            parameters.setdefault("properties", {})["ref"] = {"$ref": rng.choice(["#", "#/$defs/D", "#/$defs/D"])}
            parameters["$defs"] = {"D": {"description": self.text(), **self._object(1)}}
        return {"type": "function", "function": function}

    def _round(self, thinking: bool, index: int) -> Round:
        rng = self._rng
        calls = tuple(ToolCall(rng.choice(NAMES), self._arguments()) for _ in range(rng.randrange(4)))
        if thinking and not calls:
            calls = (ToolCall("f", {}),)
        content = self.text().strip() if calls and rng.random() < 0.5 else "I say " + self.text().strip()
        thought = "I think " + self.text().strip() if thinking else ""
        shown = tuple(self.text() for _ in calls) or (self.text(),)
        return Round(Spoken(thought.strip(), content.strip(), calls, index), shown)

    def _arguments(self) -> dict[str, Any]:
        return {self._rng.choice(("q", "größe", "limit", "a b")): self._value(2) for _ in range(self._rng.randrange(4))}

    def _value(self, depth: int) -> Any:
        rng = self._rng
        kind = rng.randrange(8 if depth else 6)
        plain = (None, True, rng.randrange(-9, 10**6), rng.randrange(1000) / 8, self.text(), "1")
        if kind < len(plain):
            return plain[kind]
        items = [self._value(depth - 1) for _ in range(rng.randrange(3))]
        return items if kind == 6 else {f"k{i} ä": item for i, item in enumerate(items)}

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = [f"{rng.choice(('b', 'a', 'größe', 'x_y'))}{i}" for i in range(rng.randrange(4))]
        schema: dict[str, Any] = {"type": "object"}
        if names or rng.random() < 0.5:
            schema["properties"] = {name: self._schema(depth) for name in names}
        if rng.random() < 0.6:
            schema["required"] = rng.sample(names, rng.randrange(len(names) + 1))
        if rng.random() < 0.3:
            schema["additionalProperties"] = rng.choice([True, False, {"type": "string"}, {}])
        return schema

    def _schema(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kind = rng.choice(SCHEMA_TYPES)
        schema: dict[str, Any] = {"description": self.text()} if rng.random() < 0.5 else {}
        if rng.random() < 0.2:
            schema["default"] = rng.choice([1, 2.5, True, "ü", None, [1, "x"], {"a": None}])
        if depth and kind == "object":
            return schema | self._object(depth - 1)
        if depth and kind == "array":
            schema |= {"type": "array", "items": self._schema(depth - 1)}
            return schema | ({"minItems": 1, "maxItems": 3} if rng.random() < 0.5 else {})
        if depth and kind == "any_of":
            return schema | {"anyOf": [self._schema(depth - 1) for _ in range(2)]}
        return schema | rng.choice(
            [
                {"type": "string"},
                {"type": "string", "minLength": 1, "pattern": "^a"},
                {"type": "integer", "minimum": 0, "maximum": 2.5},
                {"type": "number"},
                {"type": "boolean"},
                {"type": "array"},
                {"type": ["string", "null"]},
                {"type": "string", "enum": ["a", "ö"]},
                {"enum": ["a", 1, None]},
                {"type": "integer", "enum": ["wrong"]},
            ]
        )


def with_images(talk: Dialogue) -> Dialogue:
    """The same with images in what is shown."""
    rounds = tuple(replace(r, shown=tuple(f"[image 1]{text}[image 2]\n" for text in r.shown)) for r in talk.rounds)
    return replace(talk, user=f"{talk.user}[image 1]", rounds=rounds, has_images=True)


def digest(text: str) -> str:
    """The first 64 bits of the SHA-256 of ``text``, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
