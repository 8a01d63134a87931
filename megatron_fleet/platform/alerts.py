"""Alerts: what a person should look at while a run goes on, as log records that carry a kind.

Whoever finds the problem writes it to the log once, with `alert`; `telemetry.alert_rules` does so for the metrics of
each step. Every delivery listens to the log: the terminal, ``status.json`` and Slack.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, final

Kind = Literal[
    "tool_errors", "mismatch", "no_signal", "throughput", "disk", "stall", "outage", "update", "restart", "checkpoint"
]
FIELD = "alert"
"""Attribute of a log record that is an alert."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. Those of one ``kind`` and ``subject``, such as an environment, repeat each other."""

    kind: Kind
    subject: str
    text: str


def alert(logger: logging.Logger, kind: Kind, text: str, subject: str = "", level: int = logging.WARNING) -> None:
    """Write an alert to the log."""
    logger.log(level, "%s", text, extra={FIELD: (kind, subject)}, stacklevel=2)


@contextmanager
def listening(handler: logging.Handler) -> Iterator[None]:
    """Within, pass the warnings and alerts of all our modules to ``handler`` as well; the terminal still shows them."""
    root, ours = logging.getLogger(), logging.getLogger("megatron_fleet")
    if not root.handlers and logging.lastResort is not None:
        root.addHandler(logging.lastResort)  # what Python uses only while there is no other handler
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)


@final
class AlertHandler(logging.Handler):
    """Log handler that passes on alerts, each kind and subject at most once per ``cooldown_s``."""

    def __init__(
        self, receive: Callable[[Alert], None], cooldown_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(logging.WARNING)
        self._receive, self._cooldown_s, self._clock = receive, cooldown_s, clock
        self._passed: dict[tuple[str, str], float] = {}
        self._held: dict[tuple[str, str], int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        key: tuple[Kind, str] | None = getattr(record, FIELD, None)
        if key is None:
            return
        now, last = self._clock(), self._passed.get(key)
        if last is not None and now < last + self._cooldown_s:
            self._held[key] = self._held.get(key, 0) + 1
            return
        self._passed[key], held = now, self._held.pop(key, 0)
        more = f" ({held} more since the last message)" if held else ""
        try:
            self._receive(Alert(*key, record.getMessage() + more))
        except Exception:
            self.handleError(record)
