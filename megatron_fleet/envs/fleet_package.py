"""Lookup, validation and lazy import of Fleet's own client, FleetTaskEnv of fleet-ai/OpenEnv.

As a program (``python -m megatron_fleet.envs.fleet_package [FOLDER]``) it reports whether this interpreter can play
Fleet's environments, so that a run can check the episode environment's interpreter before it starts anything.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import user_path
from megatron_fleet.config.sections.env import FleetConfig

COMMIT = "009c1ed90ffee3575785eb169b8254f4c682e09a"
INSTALL = (
    "with the episode environment's pip run `pip install -e '.[fleet]' 'mcp>=1.24,<2'` in the checkout and "
    f"`pip install --no-deps --target FOLDER git+https://github.com/fleet-ai/OpenEnv@{COMMIT}`, and set "
    "env.fleet.package=FOLDER"
)
THREADS = 128
"""Threads of the loop's executor: FleetTaskEnv's reset blocks one for up to ten seconds; the default is about ten."""
_METHODS = ("reset_async", "step_async", "close_async", "_ensure_provisioned")
_ARGUMENTS = ("task_config", "ttl_seconds", "max_steps", "partial_reward")


def check_key() -> None:
    """Raise UserError if FLEET_API_KEY is not set."""
    if not os.environ.get("FLEET_API_KEY"):
        raise UserError("env.kind=fleet needs Fleet's key; set FLEET_API_KEY in the environment of the run.")


@lru_cache(maxsize=1)
def load_fleet_task_env(config: FleetConfig) -> type[Any]:
    """Return the class ``FleetTaskEnv``, ready for use in this process.

    Raises:
        UserError: it is not installed, or not in a supported version; FLEET_API_KEY is not set.
    """
    check_key()
    return _without_key(config)


def _without_key(config: FleetConfig) -> type[Any]:
    """Return the class, for a process that only looks at it. Raises UserError."""
    _prepare_process(config)
    _check_mcp()
    if config.package is not None:
        folder = user_path(config.package)
        if not (folder / "envs" / "fleet_env").is_dir():
            raise UserError(f"env.fleet.package={folder}: there is no envs/fleet_env in it; {INSTALL}.")
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    try:
        found = import_module("envs.fleet_env").FleetTaskEnv
    except ImportError as error:
        raise UserError(f"env.kind=fleet needs fleet-ai/OpenEnv ({error}); {INSTALL}.") from error
    _check_interface(found)
    return found


def _prepare_process(config: FleetConfig) -> None:
    """Set the environment variables that Fleet's packages read."""
    os.environ.setdefault("LOGFIRE_IGNORE_NO_CONFIG", "1")
    if config.ca_file is None:
        return
    file = user_path(config.ca_file)
    try:
        ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"env.fleet.ca_file={file}: no certificates can be read from it ({error}).") from error
    os.environ["SSL_CERT_FILE"] = str(file)


def _check_mcp() -> None:
    try:
        version = metadata.version("mcp")
    except metadata.PackageNotFoundError:
        raise UserError(f"env.kind=fleet needs mcp<2, and there is none in {sys.prefix}; {INSTALL}.") from None
    if int(version.partition(".")[0]) >= 2:
        raise UserError(f"env.kind=fleet needs mcp<2, but {sys.prefix} has mcp {version}; {INSTALL}.")


def _check_interface(found: type[Any]) -> None:
    """Check the methods and arguments that are used, because the package's version number never changed."""
    known = inspect.signature(found.__init__).parameters
    missing = [name for name in _METHODS if not inspect.iscoroutinefunction(getattr(found, name, None))]
    missing += [name for name in _ARGUMENTS if name not in known]
    if missing:
        raise UserError(
            f"{inspect.getfile(found)} is not the FleetTaskEnv that this adapter was made for (it lacks "
            f"{', '.join(missing)}); {INSTALL}."
        )


@lru_cache(maxsize=1)
def give_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Let ``asyncio.to_thread`` on ``loop`` use up to ``THREADS`` threads. Takes effect once per loop."""
    loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="fleet"))


def main() -> int:
    """Return exit status 0 if Fleet's package can be used; else print the reason and return 1. Needs no key."""
    try:
        _without_key(FleetConfig(package=sys.argv[1] if len(sys.argv) > 1 else None))
    except UserError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
