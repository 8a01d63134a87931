"""Thinking of a sampled turn, located by token ids so that nothing is decoded and re-encoded."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fleet.models.chat.renderer import Renderer

OPEN, CLOSE = "<think>", "</think>"


class Thinking:
    """Counts and removes thinking tokens. A model without the two tags as tokens has none."""

    def __init__(self, renderer: Renderer) -> None:
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
        count, start = 0, 0 if self._opened else -1
        for place, token in enumerate(ids):
            if token == self._open and start < 0:
                start = place
            elif token == self._close:
                count = place + 1 if start < 0 else count + place + 1 - start
                start = -1
        return count if start < 0 else count + len(ids) - start

    def without(self, ids: Sequence[int]) -> list[int]:
        """Return a turn as later prompts show it, its opening included: the ids after its last closing tag.

        A turn with unclosed thinking keeps the ids before it. A turn without thinking is unchanged.
        """
        ids = list(ids)
        if self._close in ids:
            rest = ids[len(ids) - ids[::-1].index(self._close) :]
            return [*self._unthought, *(self._stripped(rest) if self._strips else rest)]
        if self._opened:
            return [*self._unthought]
        if self._open in ids:
            return [*self._unthought, *ids[: ids.index(self._open)]]
        return [*self._opening, *ids]

    def _stripped(self, ids: list[int]) -> list[int]:
        start = 0
        while start < len(ids) and not self._tokenizer.decode([ids[start]]).strip("\n"):
            start += 1
        return ids[start:]
