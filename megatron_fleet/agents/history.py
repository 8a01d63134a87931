"""Conversation history of an episode, in token ids or in messages, so that later prompts can omit parts of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from megatron_fleet.agents.chat_turn import user_message
from megatron_fleet.envs.base import Image, ToolCall
from megatron_fleet.models.chat.parser import ToolResult, Tools
from megatron_fleet.models.chat.renderer import Renderer

OPEN, CLOSE = "<think>", "</think>"

E = TypeVar("E")


class History(Generic[E]):
    """Parts of the first prompt and all exchanges (``E``: a turn and the reply to it) since. Every prompt contains the
    system text and the task.

    Attributes:
        changed: the next prompt does not extend the current one.
    """

    def __init__(self, system: str, user: str, images: Sequence[Image], removed_note: str) -> None:
        """
        Args:
            images: shown with the task.
            removed_note: follows the task once exchanges were removed; ``{turns}`` stands for their number.
        """
        self._system, self._user, self._images = system, user, tuple(images)
        self._removed_note = removed_note
        self._exchanges: list[E] = []
        self._removed = 0
        self.changed = False

    def add(self, exchange: E) -> None:
        """Append the exchange that ends the newest prompt."""
        self._exchanges.append(exchange)

    def remove_before(self, keep: int) -> int:
        """Omit all but the newest ``keep`` exchanges from later prompts; returns the number newly removed."""
        before = self._removed
        self._removed = max(before, len(self._exchanges) - keep)
        self.changed |= self._removed > before
        return self._removed - before

    def _task(self) -> str:
        """Return the user's text of the next prompt."""
        if not self._removed:
            return self._user
        return self._user + "\n\n" + self._removed_note.replace("{turns}", str(self._removed))

    def _shown(self) -> list[E]:
        """Return the exchanges that the next prompt contains."""
        return self._exchanges[self._removed :]


class ChatHistory(History[list[dict[str, Any]]]):
    """History as the messages of a chat endpoint. The caller resets ``changed`` when a request is answered."""

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the next request."""
        first = [{"role": "system", "content": self._system}, user_message([(self._task(), self._images)])]
        return first + [message for exchange in self._shown() for message in exchange]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A sampled turn and the reply to it.

    Attributes:
        action: token ids of the turn, as sampled.
        results: results of its tool calls; when empty, ``message`` is the user's reply.
    """

    action: tuple[int, ...]
    results: tuple[ToolResult, ...]
    message: str = ""

    @property
    def images(self) -> tuple[Image, ...]:
        """Images in the results, in order."""
        return tuple(image for result in self.results for image in result.images)

    def answer(self, renderer: Renderer, last_id: int) -> list[int]:
        """Render the reply and the opening of the next turn. ``last_id``: last id of this turn in the prompt."""
        if self.results:
            return renderer.observation(self.results, last_id)
        return renderer.message(self.message, last_id)

    def with_note(self, note: str) -> Exchange:
        """Return a copy with ``note`` as the last line of the reply."""
        if not self.results:
            return replace(self, message=f"{self.message}\n{note}")
        *others, last = self.results
        return replace(self, results=(*others, replace(last, text=f"{last.text}\n{note}")))


class TokenHistory(History[Exchange]):
    """History in token ids."""

    def __init__(
        self,
        renderer: Renderer,
        system: str,
        tools: Sequence[Mapping[str, Any]],
        user: str,
        removed_note: str,
        drop_thinking: bool,
        images: Sequence[Image] = (),
    ) -> None:
        """Args: ``drop_thinking``: later prompts omit a turn's thinking, so every prompt is rendered from scratch."""
        super().__init__(system, user, images, removed_note)
        self._renderer, self._tools = renderer, tools
        self._thinking = Thinking(renderer, tools) if drop_thinking else None
        self._parts: list[list[int]] = []  # ids of the leading exchanges, rendered on demand
        self.changed = drop_thinking

    def add(self, exchange: Exchange) -> None:
        super().add(exchange)
        self.changed = self._thinking is not None

    def render(self, newest: Exchange | None = None) -> list[int]:
        """Render the prompt that ends with ``newest``, without adding it; turns keep their ids as sampled."""
        ids = list(self._renderer.initial(self._system, self._tools, self._task(), self._images))
        self._parts += [self._part(exchange) for exchange in self._exchanges[len(self._parts) :]]
        for part in [*self._parts[self._removed :], *([self._part(newest)] if newest is not None else [])]:
            if self._thinking is not None:
                del ids[-len(self._renderer.opening) :]  # the part includes its own opening
            ids += part
        return ids

    def images(self, newest: Exchange | None = None) -> list[Image]:
        """Return the images of ``render(newest)``, in order."""
        shown = [*self._shown(), *([newest] if newest is not None else [])]
        return [*self._images, *(image for exchange in shown for image in exchange.images)]

    def _part(self, exchange: Exchange) -> list[int]:
        turn = self._thinking.without(exchange.action) if self._thinking is not None else list(exchange.action)
        return turn + exchange.answer(self._renderer, turn[-1] if turn else -1)


class Thinking:
    """Counts and removes the thinking tokens of a turn, located by ids, so that nothing is decoded and re-encoded.

    A model without the two tags as tokens has none. The tags may also occur in the arguments of a tool call:
    tokens are thinking only if the parser reads the same calls without them.
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
