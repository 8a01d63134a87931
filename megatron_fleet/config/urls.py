"""Validation of server addresses in the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit


def url_problem(
    name: str, url: str, schemes: Sequence[str] = ("http", "https"), instead: str = "leave it out"
) -> str | None:
    """Return an error message if ``url`` cannot be used, else ``None``.

    Args:
        name: configuration key that holds it.
        instead: advice for an address with a user or password, which would be written to files.
    """
    if "@" in url:
        return f"{name} holds a user or a password, which would be written to files; {instead}."
    try:
        parts = urlsplit(url)
        usable = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, or an invalid port
        usable = False
    if usable and not any(c.isspace() for c in url):
        return None
    return f"{name}={url} is no address of a server; write {', '.join(f'{scheme}://host:port' for scheme in schemes)}."
