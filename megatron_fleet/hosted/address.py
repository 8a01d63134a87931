"""Address of the service, and the variables that name it and the key."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_fleet.config.sections.hosted import HostedConfig

KEY, URL, USERS_URL = "TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_API_URL"
"""Variables: of the key, and of the service's address; the third is what earlier programs of our users read."""


def address(hosted: HostedConfig, environ: Mapping[str, str] = os.environ) -> str | None:
    """Address of the service; ``None``: that of Thinking Machines."""
    return hosted.url or environ.get(URL) or environ.get(USERS_URL) or None
