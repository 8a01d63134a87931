"""Sanitised names for use inside metric and file names."""

from __future__ import annotations

import re


def environment_name(env_key: str) -> str:
    """Return an environment key as a component of metric and file names; ``/`` would add a level in both."""
    return re.sub(r"[^\w\-. :]", "_", env_key)
