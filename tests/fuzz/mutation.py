"""Invalid inputs made of valid ones."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

from fuzz.trees import Deep, Many, Path, Raw, Special, nodes, replaced

MOST_NODES = 5000
"""Size of a tree that grows no more."""
MOST_LENGTH = 300_000
"""Size of a text or of bytes that grow no more."""

TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\n",
        "\t",
        "\r\n",
        "\x1b[2J",
        "\x7f",
        "\u202e",
        "\ufeff",
        "\uffff",
        "\ud800",
        "a\udfffb",
        "é",
        "😀",
    ),
    *("..", "../x", "a/b", "/", ".", "~", "~nobody-there/x", "-", "--", "-1", "C:\\x", "x.json", "http://["),
    *("null", "true", "nan", "inf", "1e999", "0x10", "1_0", "١", "9" * 5000, "NaN", "-0", "01", "1.", "+1"),
    *("%s", "{}", "{0}", "{x!r}", "${x}", "${a:b}", "$", "`", "'", '"', "\\", "\\u", "<", ">", "&", "|", "=", ",", ":"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<done>", "[image 1]", "<|im_end|>", "---", "__proto__"),
    *("a" * 300, "[" * 3000, "all", "embedded", "auto", "layers.0", "__metadata__"),
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64),
    *(-(2**31), -(2**63) - 1, 10**6, 10**9, 10**18, 10**30, 10**400, -(10**400)),
    *(0.5, -0.5, 1e-300, 5e-324, 1e300, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan, -0.0),
)
SPECIALS = (Special("fifo"), Special("folder"), Special("loop"), Special("device"))
JSON = (
    *(Deep(50), Deep(150), Deep(900), Deep(5000), Many("x", 200_000), Many("[1, ", 40_000)),
    *(Raw('{"a": 1, "a": 2}'), Raw("9" * 5000), Raw("-"), Raw("{"), Raw("nul"), Raw("1e400"), Raw('"\\ud800"')),
)
_FORMATS = ("B", "<H", ">H", "<I", ">I", "<Q", ">Q")
_LENGTHS = (0, 1, 7, 8, 63, 64, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


class Mutator:
    """Changes trees in a few random places."""

    def __init__(self, random: Random, donors: Sequence[Any], words: Sequence[str] = ()) -> None:
        """
        Args:
            donors: trees whose parts are put into others.
            words: that mean something on this surface.
        """
        self._random, self._donors = random, donors
        self._texts = (*TEXTS, *words, *words)

    def mutated(self, tree: Any) -> Any:
        """``tree`` with one change, or with up to eight."""
        for _ in range(self._random.choice((1, 1, 1, 2, 2, 3, 4, 8))):
            path, node = self._some(tree)
            tree = replaced(tree, path, self._changed(node))
        return tree

    def _some(self, tree: Any) -> tuple[Path, Any]:
        """A node: any of them alike, or one found on a walk from the root, which favours the upper ones."""
        if self._random.random() < 0.5:
            return self._random.choice(list(nodes(tree)))
        path: Path = ()
        while isinstance(tree, dict | list) and tree and self._random.random() < 0.75:
            key = self._random.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
            path, tree = (*path, key), tree[key]
        return path, tree

    def _changed(self, node: Any) -> Any:
        chance = self._random.random()
        if chance < 0.25:
            return self._nasty()
        if chance < 0.35:
            return self._some(self._random.choice(self._donors))[1]
        if chance < 0.4:
            return self._random.choice(([node], {"x": node}, [node, node], None, [], {}))
        if isinstance(node, dict):
            return self._dict(dict(node))
        if isinstance(node, list):
            return self._list(list(node))
        if isinstance(node, str):
            return self._text(node)
        if isinstance(node, bytes):
            return self._bytes(node)
        if isinstance(node, bool) or not isinstance(node, int | float):
            return self._nasty()
        return self._number(node)

    def _nasty(self) -> Any:
        some = self._random.choice
        return some((lambda: some(self._texts), lambda: some(NUMBERS), lambda: some((None, True, False, [], {})),
                     lambda: some(JSON), lambda: some(SPECIALS)))()  # fmt: skip

    def _dict(self, node: dict[str, Any]) -> Any:
        some = self._random.choice
        if not node or self._random.random() < 0.2:
            return node | {some(self._texts): self._nasty()}
        key = some(list(node))
        kind = self._random.randrange(4)
        if kind == 0:
            del node[key]
        elif kind == 1:
            node[some(self._texts)] = node.pop(key)
        elif kind == 2:
            node[some(list(node))] = node[key]
        else:
            node[self._text(key) if isinstance(key, str) else str(key)] = node[key]
        return node

    def _list(self, node: list[Any]) -> Any:
        if not node:
            return [self._nasty()]
        place = self._random.randrange(len(node))
        kind = self._random.randrange(5)
        if kind == 0:
            del node[place]
        elif kind == 1:
            node.insert(place, self._nasty())
        elif kind == 2:
            node.insert(place, self._random.choice(node))
        elif kind == 3:
            self._random.shuffle(node)
        elif len(node) < MOST_NODES // 10:
            node *= self._random.choice((2, 3, 10))
        return node

    def _number(self, number: float) -> Any:
        try:
            return self._random.choice(
                (number + 1, number - 1, -number, number * 2, number // 2, float(number), str(number), bool(number))
            )
        except (OverflowError, ValueError):
            return 0

    def _text(self, text: str) -> str:
        a, b = self._span(len(text))
        kind = self._random.randrange(6)
        if kind == 0:
            return text[:a] + text[b:]
        if kind == 1:
            return text[:a] + self._random.choice(self._texts) + text[b:]
        if kind == 2:
            return text[:a] + self._random.choice(self._texts) + text[a:]
        if kind == 3:
            return text[:a]
        if kind == 4 and len(text) < MOST_LENGTH:
            return text[:b] + text[a:b] * self._random.choice((1, 2, 20, 1000 if b - a < 100 else 2)) + text[b:]
        return text[:a] + chr(self._random.choice((0, 10, 32, 34, 39, 60, 92, 127, 0x202E, 0xD800, 0x1F600))) + text[a:]

    def _bytes(self, data: bytes) -> bytes:
        a, b = self._span(len(data))
        kind = self._random.randrange(8)
        if kind == 0:
            return data[:a]
        if kind == 1:
            return data[:a] + data[b:]
        if kind == 2:
            return data[:b] + data[a:b] + data[b:]
        if kind == 3:
            number = struct.pack(
                form := self._random.choice(_FORMATS), self._random.choice(_LENGTHS) % 256 ** struct.calcsize(form)
            )
            return data[:a] + number + data[a + len(number) :]
        if kind == 4:
            return data[:a] + self._random.choice(self._texts).encode("utf-8", "surrogatepass") + data[a:]
        if kind == 5:
            return data[:a] + self._random.randbytes(min(b - a, 16)) + data[a + min(b - a, 16) :]
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 5))):
            if changed:
                changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _span(self, length: int) -> tuple[int, int]:
        """Where to cut: often a short span, often at an end."""
        a = self._random.randrange(length + 1)
        longest = self._random.choice((1, 4, 30, length))
        return a, min(length, a + self._random.randint(0, longest))
