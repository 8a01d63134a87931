"""Conversation history of an episode in parts, so that its prompt can be re-rendered without some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_fleet.agents.thinking import Thinking
from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.renderer import Renderer, ToolResult


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


class History:
    """Parts of the first prompt and all exchanges since. Every prompt contains the system text and the task.

    Attributes:
        changed: the next prompt does not extend the current one.
    """

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
        """
        Args:
            removed_note: follows the task once exchanges were removed; ``{turns}`` stands for their number.
            drop_thinking: later prompts omit a turn's thinking, so every prompt is rendered from scratch.
            images: shown with the task.
        """
        self._renderer = renderer
        self._system, self._tools, self._user = system, tools, user
        self._images = tuple(images)
        self._removed_note = removed_note
        self._thinking = Thinking(renderer, tools) if drop_thinking else None
        self._exchanges: list[Exchange] = []
        self._parts: list[list[int]] = []  # ids of the leading exchanges, rendered on demand
        self._removed = 0
        self.changed = drop_thinking

    def add(self, exchange: Exchange) -> None:
        """Append the exchange that ends the newest prompt."""
        self._exchanges.append(exchange)
        self.changed = self._thinking is not None

    def remove_before(self, keep: int) -> int:
        """Omit all but the newest ``keep`` exchanges from later prompts; returns the number newly removed."""
        before = self._removed
        self._removed = max(before, len(self._exchanges) - keep)
        self.changed |= self._removed > before
        return self._removed - before

    def render(self, newest: Exchange | None = None) -> list[int]:
        """Render the prompt that ends with ``newest``, without adding it; turns keep their ids as sampled."""
        user = self._user
        if self._removed:
            user += "\n\n" + self._removed_note.replace("{turns}", str(self._removed))
        ids = list(self._renderer.initial(self._system, self._tools, user, self._images))
        self._parts += [self._part(exchange) for exchange in self._exchanges[len(self._parts) :]]
        for part in [*self._parts[self._removed :], *([self._part(newest)] if newest is not None else [])]:
            if self._thinking is not None:
                del ids[-len(self._renderer.opening) :]  # the part includes its own opening
            ids += part
        return ids

    def images(self, newest: Exchange | None = None) -> list[Image]:
        """Return the images of ``render(newest)``, in order."""
        shown = [*self._exchanges[self._removed :], *([newest] if newest is not None else [])]
        return [*self._images, *(image for exchange in shown for image in exchange.images)]

    def _part(self, exchange: Exchange) -> list[int]:
        turn = self._thinking.without(exchange.action) if self._thinking is not None else list(exchange.action)
        return turn + exchange.answer(self._renderer, turn[-1] if turn else -1)
