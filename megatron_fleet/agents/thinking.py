"""Thinking of a sampled turn, located by token ids so that nothing is decoded and re-encoded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from megatron_fleet.envs.base import ToolCall
from megatron_fleet.models.chat.parser import Tools
from megatron_fleet.models.chat.renderer import Renderer

OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    """Counts and removes thinking tokens. A model without the two tags as tokens has none.

    The tags may also occur in the arguments of a tool call. Tokens are thinking only if the parser reads the same calls
    without them.
    """

    def __init__(self, renderer: Renderer, tools: Tools = ()) -> None:
        """``tools``: as for `Renderer.parse`."""
        self._renderer, self._tools = renderer, tools
        self._tokenizer = renderer.tokenizer
        self._open = self._tokenizer.special.get(OPEN, -1)
        self._close = self._tokenizer.special.get(CLOSE, -1)
        tags = [token for token in renderer.initial("", (), "") if token in (self._open, self._close)]
        self._opened = tags[-1:] == [self._open]  # the prompt opens the thinking, so a turn begins inside it
        self._opening, self._unthought = renderer.opening, renderer.unthought
        self._strips = renderer.strips_unthought

    def count(self, ids: Sequence[int]) -> int:
        """Count the thinking tokens of a turn, tags included.

        A closing tag without an opening one makes everything before it thinking; unclosed thinking extends to the end.
        """
        first, end = self._spoken(ids)
        count, start = 0, 0 if self._opened else -1
        for place, token in enumerate(ids[:first]):
            if token == self._open and start < 0:
                start = place
            elif token == self._close:
                count = place + 1 if start < 0 else count + place + 1 - start
                start = -1
        return (count if start < 0 else count + first - start) + len(ids) - end

    def without(self, ids: Sequence[int]) -> list[int]:
        """Return a turn as later prompts show it, its opening included: the ids after its last closing tag.

        A turn with unclosed thinking keeps the ids before it. A turn without thinking is unchanged.
        """
        start, end = self._spoken(ids)
        spoken = list(ids[start:end])
        if start == 0 and end == len(ids):
            return [*self._opening, *spoken]
        return [*self._unthought, *(self._stripped(spoken) if start and self._strips else spoken)]

    def _spoken(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return the range of the ids behind the last closing tag and before unclosed thinking."""
        closes = [place for place, token in enumerate(ids) if token == self._close]
        opens = [place for place, token in enumerate(ids) if token == self._open]
        if not (closes or opens or self._opened):
            return 0, len(ids)
        calls = self._calls(ids)
        if self._opened and not closes:  # the parser also takes a tag that is spelled with other tokens
            return (0, len(ids)) if any(calls) else (len(ids), len(ids))
        # What follows a closing tag outside of calls holds all of them, and so does what precedes unclosed thinking.
        # By bisection, because a policy may repeat a tag thousands of times.
        outside = bisect_left(closes, True, key=lambda place: self._calls(ids[place:]) != calls)
        start = closes[outside - 1] + 1 if outside else 0
        rest = [place for place in opens if place >= start]
        unclosed = bisect_left(rest, True, key=lambda place: self._calls(ids[max(start - 1, 0) : place]) == calls)
        return start, rest[unclosed] if unclosed < len(rest) else len(ids)

    def _calls(self, ids: Sequence[int]) -> tuple[tuple[ToolCall, ...], int]:
        """Return the calls in ``ids``, and the number of those that cannot be read."""
        parsed = self._renderer.parse(self._renderer.text(ids), self._tools)
        return parsed.tool_calls, len(parsed.errors)

    def _stripped(self, ids: list[int]) -> list[int]:
        start = 0
        while start < len(ids) and not self._tokenizer.decode([ids[start]]).strip("\n"):
            start += 1
        return ids[start:]
