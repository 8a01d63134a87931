"""The one exception that a user is meant to read, and texts of others in it."""

from __future__ import annotations

from typing import TextIO


class UserError(Exception):
    """Bad input or an impossible request, told in one sentence.

    The message names the file (or config key), the row or field, what was expected and what to do. The command line
    prints it without a traceback and exits with status 2.
    """


MAX_MESSAGE = 2000
"""Characters of an error message, and of a line that quotes what users wrote."""


def printable(text: str) -> str:
    """``text`` for a terminal: names and values in it may come from anywhere, so control characters, halves of
    surrogate pairs and marks that change the direction of writing are escaped, and what is very long is cut."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    cut = len(shown) - MAX_MESSAGE
    return shown if cut <= 0 else f"{shown[: MAX_MESSAGE // 2]} [{cut} characters] {shown[-MAX_MESSAGE // 2 :]}"


def say(text: str, stream: TextIO | None = None) -> None:
    """Print lines that may quote names and values from anywhere; see `printable`. ``None``: standard output."""
    print("\n".join(map(printable, text.splitlines())), file=stream, flush=True)
