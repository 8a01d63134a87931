"""Equal tool calls of one episode."""

from __future__ import annotations

import json

from megatron_fleet.envs.base import ToolCall


class Repetition:
    """Compares calls by name and arguments, whatever the order of the arguments.

    Attributes:
        run: equal calls in a row, the newest one included.
    """

    def __init__(self) -> None:
        self.run = 0
        self._last = ""
        self._seen: set[str] = set()

    def note(self, call: ToolCall) -> bool:
        """Take in a call; true when the episode had it before."""
        written = json.dumps([call.name, call.arguments], sort_keys=True)
        known = written in self._seen
        self.run = self.run + 1 if written == self._last else 1
        self._last = written
        self._seen.add(written)
        return known
