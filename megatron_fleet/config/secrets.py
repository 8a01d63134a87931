"""Pass each child process only the secrets that it uses.

Whoever runs code of others inherits what it was started with: a task's environment, a chat template, an engine's
plugin. So children start without any variable that looks like a secret, and what one of them needs it is handed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from megatron_fleet.config.schema import Config

STORE = ("AWS_",)
"""Beginnings of the names of an object store's variables."""
_SECRET = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|WEBHOOK)(_|$)", re.IGNORECASE)
"""In names of variables, as WANDB_API_KEY, AWS_ACCESS_KEY_ID or SLACK_WEBHOOK_URL."""
_KEPT = ("RAY_AUTH_TOKEN",)
"""Without it Ray's own processes could not talk to each other."""


def without_secrets(environ: Mapping[str, str], keep: Sequence[str] = _KEPT) -> dict[str, str]:
    """A copy of ``environ`` without secrets, except those whose names begin with one of ``keep``."""
    return {n: value for n, value in environ.items() if n.startswith(tuple(keep)) or not _SECRET.search(n)}


def secrets(environ: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """The variables that look like secrets and whose names begin with one of ``wanted``."""
    return {n: value for n, value in environ.items() if n.startswith(tuple(wanted)) and _SECRET.search(n)}


def of_environments(config: Config) -> tuple[str, ...]:
    """Beginnings of the names of the secrets that episode workers need."""
    return ("FLEET_",) if config.env.kind == "fleet" else ()
