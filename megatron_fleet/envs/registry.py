"""Registry of environment kinds (``env.kind``): opening one for an episode, starting their server for a run."""

from __future__ import annotations

import hmac
import http.client
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import Interface, load
from megatron_fleet.config.network import go_direct, through_proxy
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.config.sections.env import EnvConfig, OpenEnvConfig
from megatron_fleet.envs.base import Environment
from megatron_fleet.envs.embedded_server import EmbeddedFleet
from megatron_fleet.envs.fleet import FleetEnvironment
from megatron_fleet.envs.openenv import OpenEnvEnvironment
from megatron_fleet.envs.openenv_tools import FINISH_TOOL
from megatron_fleet.envs.python import PythonEnvironment


@dataclass(frozen=True, slots=True)
class ServerStart:
    """Parameters for starting the environments of a run.

    Attributes:
        log: file for a server's output.
        python: interpreter of the episode environment.
        seed: the run's seed.
        environment: environment variables of a server process; ``None``: those of this process.
        host: address that a server listens on.
        token: secret that a server requires, see `environment_token`; empty: none, on loopback only.
    """

    env: EnvConfig
    log: Path
    python: str
    seed: int
    environment: Mapping[str, str] | None = None
    host: str = "127.0.0.1"
    token: str = ""


class Server(Protocol):
    """Server of a run's environments, local or remote; its methods block."""

    @property
    def url(self) -> str:
        """Address for `make_environment`; empty if there is none."""
        ...

    def ended(self) -> str | None:
        """Return why a server started by the run no longer serves; ``None``: it serves, or there is none."""
        ...

    def restart(self) -> None:
        """Restart that server at the same address. Raises UserError."""
        ...

    def stop(self) -> None:
        """Stop it. Idempotent; may be called while `restart` runs in a thread, which then fails."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentBackend:
    """Factory and server of one kind of environment.

    Attributes:
        open: creates an Environment for one episode from the section ``env``, the server's address, the episode's name
            and the token of the run's own server.
        serve: starts the server that a run needs. Raises UserError.
    """

    open: Callable[[EnvConfig, str, str | None, str], Environment]
    serve: Callable[[ServerStart], Server]


def make_environment(config: EnvConfig, url: str, episode: str | None = None, token: str = "") -> Environment:
    """Create an Environment for one episode.

    Args:
        url: address of the server returned by ``serve``.
        episode: the episode's name on the server.
        token: the token given to ``serve``.
    """
    return _kind(config.kind).open(config, url, episode, token)


def environment_token(token: str) -> str:
    """Derive the secret of the run's environment server from the run's, which tasks there cannot recover from it."""
    return hmac.new(token.encode(), b"environment server", "sha256").hexdigest()


def serve(start: ServerStart) -> Server:
    """Start the environments of a run. Raises UserError."""
    return _kind(start.env.kind).serve(start)


def _kind(name: str) -> EnvironmentBackend:
    return KINDS.get(name) or EnvironmentBackend(partial(_own, name), _own_server)


class EnvironmentFactory(Protocol):
    def __call__(self, config: EnvConfig, episode: str | None, /) -> Environment:
        """Return the environment of one episode. ``episode``: its name."""
        ...


OWN_ENVIRONMENT = Interface(
    "env.kind",
    "environment",
    EnvironmentFactory,
    "episode workers",
    awaited=("reset", "step", "verify", "close"),
)


def _own(path: str, config: EnvConfig, url: str, episode: str | None, token: str) -> Environment:
    environment: Environment = load(OWN_ENVIRONMENT, path)(config, episode)
    return environment


def _own_server(start: ServerStart) -> Server:
    """Start nothing: a user's class starts what it needs and is responsible for ``env.url``."""
    return _Elsewhere("")


def no_answer(url: str, timeout_s: float) -> str | None:
    """Return why the server at ``url`` does not answer; ``None`` if it answers, even with a client error."""
    base = url.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1)
    go_direct(base)
    way = through_proxy(base)
    try:
        with urllib.request.build_opener().open(f"{base}/health", timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        # A proxy answers 502 to 504 for a server that is gone, 403 or 407 for one that it does not serve.
        refused = error.code >= 500 or (way and error.code in (403, 407))
        return f"{url} answers {error.code} {error.reason}{way}" if refused else None
    except urllib.error.URLError as error:
        return f"{url} is not reachable: {error.reason}{way}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{url} does not answer: {error}{way}"


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Environments served outside of the run."""

    url: str

    def ended(self) -> str | None:
        return None

    def restart(self) -> None:
        return None

    def stop(self) -> None:
        return None


def _embedded(start: ServerStart) -> Server:
    fleet = EmbeddedFleet()
    fleet.start(start.env, start.log, start.python, start.seed, start.environment, start.host, start.token)
    return fleet


def _elsewhere(start: ServerStart) -> Server:
    return _Elsewhere(start.env.url or "")


def _hosted(start: ServerStart) -> Server:
    """Start nothing for Fleet's control plane; check first that the workers' interpreter can use Fleet's package."""
    command = [start.python, "-m", "megatron_fleet.envs.fleet_package"]
    command += [] if start.env.fleet.package is None else [start.env.fleet.package]
    try:
        asked = subprocess.run(
            command,
            env=without_secrets(os.environ),
            capture_output=True,
            text=True,
            timeout=start.env.start_timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"Fleet's package could not be looked up with the episode environment's Python: {error}"
        ) from error
    if asked.returncode:
        raise UserError(asked.stdout.strip() or asked.stderr.strip() or "Fleet's package cannot be used.")
    return _Elsewhere("")


EMBEDDED = OpenEnvConfig(interface="mcp", finish_tool=FINISH_TOOL)
"""OpenEnv settings for the embedded fleet's server."""
KINDS: Mapping[str, EnvironmentBackend] = MappingProxyType(
    {
        "embedded": EnvironmentBackend(
            lambda config, url, name, token: OpenEnvEnvironment(config, url, EMBEDDED, name, token), _embedded
        ),
        "openenv": EnvironmentBackend(
            lambda config, url, name, _: OpenEnvEnvironment(config, url, config.openenv, name), _elsewhere
        ),
        "fleet": EnvironmentBackend(lambda config, url, name, _: FleetEnvironment(config), _hosted),
        "python": EnvironmentBackend(lambda config, url, name, _: PythonEnvironment(config), _own_server),
    }
)
