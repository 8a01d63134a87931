"""An endpoint without a server, for tests in simulated time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from agent_doubles import forever
from waiting import LOOP_TIME

from megatron_fleet.agents import chat_client
from megatron_fleet.agents.chat_client import Answer, ChatClient, Usage


def answering(monkeypatch: pytest.MonkeyPatch, *script: dict[str, Any] | Exception | None) -> None:
    """Every try of every `ChatClient` gets what ``script`` has next, the last item again and again: a message, an
    exception, or ``None`` for no answer at all."""
    items = itertools.chain(script, itertools.repeat(script[-1]))

    async def ask(self: ChatClient, *question: Any) -> Answer:
        said = next(items)
        if isinstance(said, Exception):
            raise said
        if said is None:
            await forever()
        return Answer(said, "stop", Usage(10, 7))

    monkeypatch.setattr(ChatClient, "ask", ask)
    monkeypatch.setattr(chat_client, "time", LOOP_TIME)
