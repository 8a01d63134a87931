"""Names that become parts of other names."""

from __future__ import annotations

import re


def environment_name(env_key: str) -> str:
    """An environment key as a part of metric and file names; ``/`` would be a level of its own in both."""
    return re.sub(r"[^\w\-. :]", "_", env_key)
