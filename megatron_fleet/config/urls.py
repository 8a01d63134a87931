"""Validation of server addresses in the configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import parse_qsl, urlsplit

_SECRET = re.compile(r"key|token|secret|passw|credential|(^|[-_.])(sig|signature|auth|jwt|pat)($|[-_.])", re.IGNORECASE)
"""Matches names of query parameters that carry secrets, such as api_key, sig or X-Amz-Credential."""


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
    if secret := secret_parameter(url):
        return f"{name} holds the query parameter {secret}, which would be written to files; leave it out."
    try:
        parts = urlsplit(url)
        usable = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # unbalanced brackets, or an invalid port
        usable = False
    if usable and not any(c.isspace() for c in url):
        return None
    return f"{name}={url} is no address of a server; write {', '.join(f'{scheme}://host:port' for scheme in schemes)}."


def secret_parameter(url: str) -> str | None:
    """Return the name of the first query parameter of ``url`` that looks like a secret."""
    query = url.partition("?")[2].partition("#")[0]
    return next((name for name, _ in parse_qsl(query, keep_blank_values=True) if _SECRET.search(name)), None)
