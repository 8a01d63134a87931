"""Progress line of a copy or a conversion: bytes, bytes per second, time left."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from megatron_fleet.config.errors import printable

INTERVAL_S = 10.0
"""Interval between lines if the output is not a terminal, as in the log of a batch job."""


class ProgressLine:
    """Redraws one line on a terminal, or prints a line periodically elsewhere. Thread-safe.

    A context manager: leaving it ends the line.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._what, self._stream = "", stream or sys.stderr
        self._watched = self._stream.isatty()
        self._lock = threading.Lock()
        self._total = self._done = self._before = 0
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._end(whole=failed is None)

    def start(self, what: str, total: int, done: int = 0) -> None:
        """Begin an activity. ``done``: bytes of ``total`` completed by an earlier run."""
        self._end(whole=True)
        with self._lock:
            self._what, self._total, self._done, self._before = what, total, done, done
            self._started = self._shown = time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Add completed bytes."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._shown >= (0.1 if self._watched else INTERVAL_S):
                self._shown = now
                self._show(now)

    def _end(self, whole: bool) -> None:
        """Print the final state of the current activity and end its line; after a failure only end the line."""
        with self._lock:
            if not self._what:
                return
            if whole:
                self._show(time.monotonic())
            if self._watched:
                print(file=self._stream, flush=True)
            self._what = ""

    def _show(self, now: float) -> None:
        seconds = max(now - self._started, 1e-9)
        rate = (self._done - self._before) / seconds
        left = f"{(self._total - self._done) / rate:.0f} s left" if rate else ""
        share = 100 * self._done / self._total if self._total else 100
        unit, name = (1e9, "GB") if self._total >= 1e9 else (1e6, "MB")
        text = (
            f"{self._what}: {self._done / unit:.2f} of {self._total / unit:.2f} {name} ({share:.0f} %), "
            f"{rate / unit:.2f} {name}/s, {left if self._done < self._total else f'{seconds:.1f} s'}"
        )
        if self._watched:
            print(f"\r\x1b[2K{printable(text)}", end="", file=self._stream, flush=True)
        else:
            print(printable(text), file=self._stream, flush=True)
