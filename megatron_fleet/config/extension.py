"""User-supplied components: a key that takes the name of a built-in one also accepts ``package.module:name``."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.interfaces import INTERFACES, Interface
from megatron_fleet.config.secrets import without_secrets

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
CHECK_TIMEOUT_S = 300.0
REFUSED = 2
"""Exit status of the subprocess of `check` when `load` fails."""


@dataclass(frozen=True, slots=True)
class Open:
    """Annotation of a text field: one of ``names``, or the ``package.module:name`` of a user's object.

    Attributes:
        more: further names, in words; the registry that knows them refuses others before a run starts.
    """

    names: tuple[str, ...]
    more: str | None = None

    @property
    def spelt(self) -> str:
        """Accepted values, in words."""
        names = [*self.names, *([] if self.more is None else [self.more])]
        ours = f"one of {', '.join(names)} or " if names else ""
        return f"{ours}package.module:name"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str) -> str:
        if self.more is None and value not in self.names and not is_path(value):
            raise ValueError(f"not {self.spelt}")
        return value


def is_path(name: str) -> bool:
    """Return whether ``name`` has the form ``package.module:name``."""
    return _PATH.fullmatch(name) is not None


@functools.cache
def load(key: str, path: str) -> Callable[..., Any]:
    """Import the callable that a key names. Modules are looked up on ``sys.path`` and in the current folder.

    Args:
        key: configuration key, one of `INTERFACES`.

    Raises:
        UserError: it cannot be imported, or does not have the key's interface.
    """
    interface = INTERFACES[key]
    if not is_path(path):
        raise UserError(f"{key}={path} is neither one of ours nor package.module:name.")
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # user code may raise anything, including SystemExit
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            where = "in the current folder or on PYTHONPATH"
            raise UserError(f"{key}={path}: there is no module {error.name} {where}; add it.") from None
        raise UserError(f"{key}={path}: importing {module_name} raises {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        what = f"{module_name} has no {name}" if found is None else f"{name} is not a function"
        raise UserError(f"{key}={path}: {what}; name a function of {interface.spelt}.")
    _check_interface(f"{key}={path}", found, interface)
    return found


def _check_interface(where: str, found: Callable[..., Any], interface: Interface) -> None:
    try:
        inspect.signature(found).bind(*interface.arguments)
    except TypeError as error:
        raise UserError(f"{where}: must take {interface.spelt}: {error}.") from None
    except ValueError:  # some builtins have no signature
        pass
    if _is_async(found) != interface.is_async and not interface.may_be_async:
        must = "must be an async function" if interface.is_async else "must not be an async function"
        raise UserError(f"{where}: {must}, as it is {'' if interface.is_async else 'not '}awaited; correct it.")
    for name in interface.awaited if isinstance(found, type) else ():
        if not _is_async(getattr(found, name, None)):
            raise UserError(f"{where}: has no async method {name}; add it.")


def _is_async(found: Any) -> bool:
    """Return whether calling ``found`` gives a coroutine, as far as its definition tells."""
    called = type(found).__call__ if callable(found) else None
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(called)


def check(key: str, path: str, python: str = sys.executable) -> None:
    """Run `load` in a subprocess, so that the imports of a user's module, such as torch, stay out of this process.
    It gets no variable that looks like a secret; a component that needs one reads it when it is called.

    Args:
        python: interpreter of the process that will use it.

    Raises:
        UserError: as for `load`, or the subprocess crashes or takes longer than ``CHECK_TIMEOUT_S``.
    """
    command = [python, "-m", "megatron_fleet.config.extension", key, path]
    done = run_check(command, f"{key}={path}: importing it")
    lines = done.stderr.strip().splitlines()
    if done.returncode == REFUSED and lines:
        raise UserError(lines[-1])
    if done.returncode:
        raise UserError(f"{key}={path}: importing it ends Python with status {done.returncode}: {done.stderr[-300:]}")


def run_check(command: list[str], what: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a check of a user's code in a subprocess, without variables that look like secrets.

    Args:
        what: the check, for the error.
        given: its standard input.

    Raises:
        UserError: it takes longer than ``CHECK_TIMEOUT_S``.
    """
    try:
        return subprocess.run(
            command,
            input=given,
            env=without_secrets(os.environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{what} takes more than {CHECK_TIMEOUT_S:g} s.") from None


def main(key: str, path: str) -> int:
    """Run `load` and return the exit status: `REFUSED`, with the reason on stderr, when it fails."""
    try:
        load(key, path)
    except UserError as error:
        say(str(error), sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
