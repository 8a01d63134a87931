"""Files of overrides, one ``section.key=value`` a line, which every command takes as ``@FILE``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_fleet.config.errors import UserError

HEAD = "# Overrides measured by `mfleet tune`; give them to a command as @FILE."


def arguments(line: str) -> list[str]:
    """Return the arguments that a line of a file stands for: itself, or none if it is empty or a comment."""
    text = line.strip()
    return [] if not text or text.startswith("#") else [text]


def write_overrides(path: Path, settings: Sequence[str]) -> None:
    """Write settings into a file; other keys that it already has stay.

    Raises:
        UserError: the file cannot be read or written, or is something else.
    """
    try:
        before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); name another file.") from None
    kept = [text for line in before for text in arguments(line)]
    if wrong := next((text for text in kept if "=" not in text), None):
        raise UserError(f"{path}: line {wrong!r:.100} is not key=value; correct it, or name another file.")
    merged = {text.partition("=")[0]: text for text in (*kept, *settings)}
    try:
        path.write_text("\n".join([HEAD, *merged.values()]) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name another file.") from None
