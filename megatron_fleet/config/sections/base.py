"""Base class of the sections, type of their rules, and the check of server addresses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config

Rule: TypeAlias = "Callable[[Config], str | None]"
"""A check across several keys: returns an error message that names the keys, their values and the fix, or ``None``."""
MAX_TOKENS = 1 << 26
"""Largest length in tokens: far above what any model or device takes."""
_SECRET = re.compile(r"key|token|secret|passw|credential|(^|[-_.])(sig|signature|auth|jwt|pat)($|[-_.])", re.IGNORECASE)
"""Matches names of query parameters that carry secrets, such as api_key, sig or X-Amz-Credential."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    accepted = ", ".join(f"{scheme}://host:port" for scheme in schemes)
    return f"{name}={url} is not the address of a server; write {accepted}."


def is_in_store(url: str) -> bool:
    """Whether an address is one of a bucket, or below one, in an object store."""
    return re.fullmatch(r"(s3|gs)://[^/]+(/.*)?", url) is not None


def bucket_problem(name: str, url: str | None) -> str | None:
    """Return an error message if the value of key ``name`` is neither ``None`` nor an address in an object store."""
    if url is not None and "@" in url:
        return f"{name} holds an @, as an address with a key does, which would be written to files; leave it out."
    if url is None or is_in_store(url):
        return None
    return f"{name}={url} is not an address in an object store; write s3://bucket/prefix or gs://bucket/prefix."


def secret_parameter(url: str) -> str | None:
    """Return the name of the first query parameter of ``url`` that looks like a secret."""
    query = url.partition("?")[2].partition("#")[0]
    return next((name for name, _ in parse_qsl(query, keep_blank_values=True) if _SECRET.search(name)), None)
