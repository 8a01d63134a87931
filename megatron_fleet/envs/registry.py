"""The kinds of environments (``env.kind``): how one is opened for an episode, and what is started for a run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.env import Env
from megatron_fleet.config.sections.openenv import OpenEnv
from megatron_fleet.envs.base import Environment
from megatron_fleet.envs.embedded.fleet import EmbeddedFleet
from megatron_fleet.envs.fleet import FINISH_TOOL, FleetEnvironment
from megatron_fleet.envs.openenv import OpenEnvEnvironment


@dataclass(frozen=True, slots=True)
class Start:
    """What starting the environments of a run may need.

    Attributes:
        log: file that a server's output goes to.
        python: interpreter of the episode environment.
        seed: of the run.
    """

    env: Env
    log: Path
    python: str
    seed: int


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of environments.

    Attributes:
        open: the section ``env``, the address of the server, the episode's name → an Environment for one episode.
        serve: starts what the run needs, gives its address (empty without one), and ends it. Raises UserError.
    """

    open: Callable[[Env, str, str | None], Environment]
    serve: Callable[[Start], AbstractContextManager[str]]


def make_environment(config: Env, url: str, episode: str | None = None) -> Environment:
    """One Environment, for one episode, at what ``serve`` gave as ``url``. ``episode`` names it to the server."""
    return KINDS[config.kind].open(config, url, episode)


def serve(start: Start) -> AbstractContextManager[str]:
    """Start the environments of a run; the context is the address for ``make_environment``. Raises UserError."""
    return KINDS[start.env.kind].serve(start)


@contextmanager
def _embedded(start: Start) -> Iterator[str]:
    fleet = EmbeddedFleet()
    try:
        yield fleet.start(start.env, start.log, start.python, start.seed)
    finally:
        fleet.stop()


@contextmanager
def _elsewhere(start: Start) -> Iterator[str]:
    yield start.env.url or ""


@contextmanager
def _hosted(start: Start) -> Iterator[str]:
    """Fleet's control plane needs nothing started; whether the workers' interpreter can reach it is asked first."""
    command = [start.python, "-m", "megatron_fleet.envs.fleet_package"]
    command += [] if start.env.fleet.package is None else [start.env.fleet.package]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=start.env.start_timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"The episode environment's Python could not be asked for Fleet's package: {error}") from error
    if asked.returncode:
        raise UserError(asked.stdout.strip() or asked.stderr.strip() or "Fleet's package cannot be used.")
    yield ""


EMBEDDED = OpenEnv(interface="mcp", finish_tool=FINISH_TOOL)
"""How the embedded fleet's server is played."""
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "embedded": Kind(lambda config, url, name: OpenEnvEnvironment(config, url, EMBEDDED, name), _embedded),
        "openenv": Kind(lambda config, url, name: OpenEnvEnvironment(config, url, config.openenv, name), _elsewhere),
        "fleet": Kind(lambda config, url, name: FleetEnvironment(config), _hosted),
    }
)
