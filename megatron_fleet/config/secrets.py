"""Pass each child process only the secrets that it uses.

Child processes run third-party code (a task's environment, a chat template, an engine plugin), which can read their
environment variables. So they start without any variable that looks like a secret, and each gets only those it needs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron_fleet.config.schema import Config

STORE = ("AWS_",)
"""Name prefixes of an object store's variables."""
_SECRET = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|WEBHOOK)(_|$)", re.IGNORECASE)
"""Matches names of secret variables, such as WANDB_API_KEY, AWS_ACCESS_KEY_ID or SLACK_WEBHOOK_URL."""
_KEPT = ("RAY_AUTH_TOKEN",)
"""Needed by Ray's own processes to talk to each other."""


def without_secrets(environ: Mapping[str, str], keep: Sequence[str] = _KEPT) -> dict[str, str]:
    """Return a copy of ``environ`` without secrets, except those whose names begin with one of ``keep``."""
    return {n: value for n, value in environ.items() if n.startswith(tuple(keep)) or not _SECRET.search(n)}


def secrets(environ: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Return the variables that look like secrets and whose names begin with one of ``wanted``."""
    return {n: value for n, value in environ.items() if n.startswith(tuple(wanted)) and _SECRET.search(n)}


def of_environments(config: Config) -> tuple[str, ...]:
    """Return the name prefixes of the secrets that episode workers need."""
    return ("FLEET_",) if config.env.kind == "fleet" else ()
