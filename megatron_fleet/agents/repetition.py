"""Detection of repeated tool calls within one episode."""

from __future__ import annotations

import json

from megatron_fleet.envs.base import ToolCall


class Repetition:
    """Compares calls by name and arguments, ignoring the order of the arguments.

    Attributes:
        run: number of consecutive equal calls, the newest included.
    """

    def __init__(self) -> None:
        self.run = 0
        self._last = ""
        self._seen: set[str] = set()

    def note(self, call: ToolCall) -> bool:
        """Record a call; return whether it was made before in the episode."""
        written = json.dumps([call.name, call.arguments], sort_keys=True)
        known = written in self._seen
        self.run = self.run + 1 if written == self._last else 1
        self._last = written
        self._seen.add(written)
        return known
