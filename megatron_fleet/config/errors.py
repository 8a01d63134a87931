"""`UserError`, whose message is shown to the user, and helpers for printing untrusted text."""

from __future__ import annotations

import logging
from typing import Any, TextIO


class UserError(Exception):
    """Bad input or an impossible request, explained in one sentence.

    The message names the file (or config key), the row or field, what was expected and what to do. The command line
    prints it without a traceback and exits with status 2.
    """


MAX_MESSAGE = 2000
"""Maximum length in characters of an error message, and of a line that quotes user input."""


def printable(text: str) -> str:
    """Escape and shorten ``text`` for a terminal. Names and values in it may come from anywhere, so control characters,
    unpaired surrogates and bidirectional marks are escaped, and very long text is cut in the middle."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    cut = len(shown) - MAX_MESSAGE
    return shown if cut <= 0 else f"{shown[: MAX_MESSAGE // 2]} [{cut} characters] {shown[-MAX_MESSAGE // 2 :]}"


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line that may quote untrusted names and values, which cannot end it; see `printable`.

    Args:
        stream: ``None``: standard output.
    """
    print(printable(text), file=stream, flush=True)


def say_lines(text: str, stream: TextIO | None = None) -> None:
    """Print a text of several lines, in which no name from elsewhere may hold a line end; else as `say`.

    Args:
        text: a line end after its last line makes no difference.
        stream: ``None``: standard output.
    """
    print("\n".join(map(printable, text.removesuffix("\n").split("\n"))), file=stream, flush=True)


class LogFormatter(logging.Formatter):
    """Formatter of log records that may quote untrusted names and texts: each is one line, see `printable`.

    Tracebacks keep their lines, indented, so that none looks like another record.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join("  " + printable(line) for line in super().formatException(ei).splitlines())


if logging.lastResort is not None:  # the handler of every process that adds none, as ours do
    logging.lastResort.setFormatter(LogFormatter())
