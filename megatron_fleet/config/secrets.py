"""Pass each child process only the secrets that it uses.

Child processes run third-party code (a task's environment, a chat template, an engine plugin), which can read their
environment variables. So they start without any variable that looks like a secret, and each gets only those it needs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fleet.config.schema import EnvConfig

STORE = ("AWS_", "GOOGLE_APPLICATION_CREDENTIALS")
"""Name prefixes of an object store's variables."""
SERVICE = ("TINKER_",)
"""Name prefixes of a hosted trainer's variables."""
RAY = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Needed by Ray's processes to authenticate to each other, and to an existing cluster."""
WANDB_KEY = "WANDB_API_KEY"
SLACK_TOKEN = "SLACK_BOT_TOKEN"
_WORDS = (
    *("API_?KEY", "KEY", "TOKEN", "SECRETS?", "PASS", "PASSWD", "PASSPHRASE", "PAT", "DSN", "JWT", "CREDENTIALS?"),
    *("AUTH_CONFIG", "CONNECTION_STRING", "WEBHOOK"),
)
_SECRET = re.compile(rf"(^|_)({'|'.join(_WORDS)})(_|$)|PASSWORD|_(PWD|AUTH)$", re.IGNORECASE)
"""Matches names of secret variables, such as WANDB_API_KEY, PGPASSWORD, GITHUB_PAT, MYSQL_PWD or SLACK_WEBHOOK_URL."""
SHORTEST_REDACTED = 6
"""Characters; a shorter value, such as `KEY=yes`, would be found in ordinary words."""
_USER_IN_URL = re.compile(r"://[^/?#\s]*:[^/?#\s]*@|https?://[^/?#\s]*@", re.IGNORECASE)
"""Matches values that contain an address with a password, or with a user, which may be a token."""


def without_secrets(
    environ: Mapping[str, str], families: Sequence[str] = (), names: Sequence[str] = ()
) -> dict[str, str]:
    """Return a copy of ``environ`` without secrets.

    Args:
        families: prefixes, as `STORE`, of variables that are kept.
        names: further variables that are kept.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in names or name.startswith(tuple(families)) or not _is_secret(name, value)
    }


def wandb_key(modality: str) -> str | None:
    """Key from ``WANDB_API_KEY_<MODALITY>``, such as WANDB_API_KEY_TOOL_USE, else from ``WANDB_API_KEY``."""
    return os.environ.get(f"{WANDB_KEY}_{modality.upper()}") or os.environ.get(WANDB_KEY) or None


def secrets(environ: Mapping[str, str], families: Sequence[str]) -> dict[str, str]:
    """Return the variables that look like secrets and whose names begin with one of ``families``."""
    return {n: value for n, value in environ.items() if n.startswith(tuple(families)) and _is_secret(n, value)}


def redacted(text: str) -> str:
    """Replace the values of this process's own secrets in a text that leaves the machine by ``[NAME]``."""
    own = {n: value for n, value in os.environ.items() if len(value) >= SHORTEST_REDACTED and _is_secret(n, value)}
    for name, value in sorted(own.items(), key=lambda item: -len(item[1])):
        text = text.replace(value, f"[{name}]")
    return text


@contextlib.contextmanager
def only_secrets(families: Sequence[str], names: Sequence[str] = ()) -> Iterator[None]:
    """Within, hide this process's own secrets, except those whose names begin with one of ``families`` or are among
    ``names``, from a library that starts processes itself.
    """
    kept = without_secrets(os.environ, families, names)
    hidden = {name: os.environ.pop(name) for name in os.environ.keys() - kept.keys()}
    try:
        yield
    finally:
        os.environ.update(hidden)


def find_processor() -> None:
    """Have Python's `platform` find the processor's name, which it then remembers, without secrets: W&B and the openai
    client ask it for that, and it starts ``uname -p`` in the environment of this process.
    """
    with only_secrets(()):
        platform.processor()


def take_secrets(received: Mapping[str, str]) -> None:
    """Add secrets that this process was sent to its environment, after `find_processor`."""
    find_processor()
    os.environ.update(received)


def _is_secret(name: str, value: str) -> bool:
    # Without its proxy, a child process would have no network at all.
    in_value = not name.lower().endswith("_proxy") and _USER_IN_URL.search(value) is not None
    return in_value or _SECRET.search(name) is not None


def of_environments(env: EnvConfig) -> tuple[str, ...]:
    """Return the name prefixes of the secrets that episode workers need."""
    return ("FLEET_",) if env.about.hosted else ()
