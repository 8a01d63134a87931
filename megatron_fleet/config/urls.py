"""Addresses of servers, as users write them."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit


def url_problem(
    name: str, url: str, schemes: Sequence[str] = ("http", "https"), instead: str = "leave it out"
) -> str | None:
    """Why ``url`` cannot be used, in one sentence; ``None`` when it can.

    Args:
        name: of the key that holds it.
        instead: what to do with a user or password, which would be written to files.
    """
    if "@" in url:
        return f"{name} holds a user or a password, which would be written to files; {instead}."
    try:
        parts = urlsplit(url)
        usable = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is none
        usable = False
    if usable and not any(c.isspace() for c in url):
        return None
    return f"{name}={url} is no address of a server; write {', '.join(f'{scheme}://host:port' for scheme in schemes)}."
