"""The conversation of an episode as messages, so that earlier turns can be left out of later requests."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_fleet.agents.chat_turn import ChatTurn
from megatron_fleet.envs.base import Image
from megatron_fleet.models.chat.renderer import ToolResult


class ChatHistory:
    """The first messages and all exchanges since. System text and task are in every request.

    Attributes:
        shortened: the next request leaves out what the present one said.
    """

    def __init__(self, system: str, user: str, images: Sequence[Image], removed_note: str) -> None:
        """``removed_note``: follows the task where exchanges were removed, ``{turns}`` of them."""
        self._system, self._user, self._images = system, user, images
        self._removed_note = removed_note
        self._exchanges: list[list[dict[str, Any]]] = []
        self._removed = 0
        self.shortened = False

    def add(self, exchange: Iterable[dict[str, Any]]) -> None:
        """A turn and what it was answered."""
        self._exchanges.append(list(exchange))

    def remove_before(self, keep: int) -> int:
        """Leave out of later requests what precedes the newest ``keep`` exchanges; returns how many more that are."""
        before = self._removed
        self._removed = max(before, len(self._exchanges) - keep)
        self.shortened |= self._removed > before
        return self._removed - before

    def messages(self) -> list[dict[str, Any]]:
        """What the next request says."""
        user = self._user
        if self._removed:
            user += "\n\n" + self._removed_note.replace("{turns}", str(self._removed))
        first = [{"role": "system", "content": self._system}, _user([(user, self._images)])]
        return first + [message for exchange in self._exchanges[self._removed :] for message in exchange]


def answers(turn: ChatTurn, results: Sequence[ToolResult], note: str) -> list[dict[str, Any]]:
    """What a turn's calls are answered: a message of role ``tool`` for each, whether it could be read or not.

    The role takes text only, so images follow in a message of the user's, behind their names in the results.

    Args:
        note: last line of what is shown; empty for none.
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
    """What a turn without calls is answered."""
    return _user([(text, ())])


def _tool(text: str, call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _user(said: Sequence[tuple[str, Sequence[Image]]]) -> dict[str, Any]:
    """Texts, each with the images behind it; as plain text where there is no image."""
    if not any(images for _, images in said):
        return {"role": "user", "content": "\n".join(text for text, _ in said)}
    parts: list[dict[str, Any]] = []
    for text, images in said:
        parts.append({"type": "text", "text": text})
        parts += [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
    return {"role": "user", "content": parts}


def _url(image: Image) -> str:
    """As a data URL (RFC 2397)."""
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
