"""Deadline of one turn, enforced by the engine."""

from __future__ import annotations

import asyncio
from typing import Any


class Deadline:
    """Abort a request at its deadline; vLLM then answers it with the tokens sampled so far."""

    def __init__(self, llm: Any, name: str, seconds: float) -> None:
        self._llm, self._name, self._seconds = llm, name, seconds
        self._abort: asyncio.Task[None] | None = None

    @property
    def passed(self) -> bool:
        return self._abort is not None

    def __enter__(self) -> Deadline:
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._pass)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _pass(self) -> None:
        self._abort = asyncio.ensure_future(self._llm.abort(self._name))
