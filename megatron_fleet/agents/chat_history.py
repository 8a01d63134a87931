"""Conversation history of an episode as messages, so that later requests can omit earlier turns."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_fleet.agents.chat_turn import ChatTurn
from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.renderer import ToolResult


class ChatHistory:
    """First messages and all exchanges since. Every request contains the system text and the task.

    Attributes:
        shortened: the next request omits messages of the current one.
    """

    def __init__(self, system: str, user: str, images: Sequence[Image], removed_note: str) -> None:
        """``removed_note``: follows the task once exchanges were removed; ``{turns}`` stands for their number."""
        self._system, self._user, self._images = system, user, images
        self._removed_note = removed_note
        self._exchanges: list[list[dict[str, Any]]] = []
        self._removed = 0
        self.shortened = False

    def add(self, exchange: Iterable[dict[str, Any]]) -> None:
        """Append a turn and the reply to it."""
        self._exchanges.append(list(exchange))

    def remove_before(self, keep: int) -> int:
        """Omit all but the newest ``keep`` exchanges from later requests; returns the number newly removed."""
        before = self._removed
        self._removed = max(before, len(self._exchanges) - keep)
        self.shortened |= self._removed > before
        return self._removed - before

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the next request."""
        user = self._user
        if self._removed:
            user += "\n\n" + self._removed_note.replace("{turns}", str(self._removed))
        first = [{"role": "system", "content": self._system}, _user([(user, self._images)])]
        return first + [message for exchange in self._exchanges[self._removed :] for message in exchange]


def answers(turn: ChatTurn, results: Sequence[ToolResult], note: str) -> list[dict[str, Any]]:
    """Build the replies to a turn's calls: a message of role ``tool`` for each, even for an invalid call.

    The role takes text only, so images follow in a user message, each after its label in the results.

    Args:
        note: last line of the results; empty for none.
    """
    ids = iter(turn.error_ids)
    told = [_tool(result.text, result.call_id or next(ids)) for result in results]
    told[-1]["content"] += f"\n{note}" if note else ""
    shown = [
        (f"{result.name}: [image {number}]", [image])
        for result in results
        for number, image in enumerate(result.images, 1)
    ]
    return [*told, _user(shown)] if shown else told


def reminder(text: str) -> dict[str, Any]:
    """Build the reply to a turn without calls."""
    return _user([(text, ())])


def _tool(text: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _user(said: Sequence[tuple[str, Sequence[Image]]]) -> dict[str, Any]:
    """Build a user message of texts, each followed by its images; plain text when there are no images."""
    if not any(images for _, images in said):
        return {"role": "user", "content": "\n".join(text for text, _ in said)}
    parts: list[dict[str, Any]] = []
    for text, images in said:
        parts.append({"type": "text", "text": text})
        parts += [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
    return {"role": "user", "content": parts}


def _url(image: Image) -> str:
    """Encode an image as a data URL (RFC 2397)."""
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
