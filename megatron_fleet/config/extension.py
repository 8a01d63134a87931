"""User-supplied components: a key that takes the name of a built-in one also accepts ``package.module:name``."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.names import is_path
from megatron_fleet.config.secrets import without_secrets

CHECK_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Interface:
    """Interface of one kind of part, declared where the part is called.

    The types of the signature are for readers and type checkers: `load` compares the number of arguments, and whether
    the part is ``async``.

    Attributes:
        key: configuration key that names it.
        part: its name in words.
        signature: protocol with the ``__call__`` of the object that the key names.
        runs_in: processes that call it, in words.
        awaited: async methods of what it returns, checked if the key names a class.
        may_be_async: both an ``async`` function and another one are accepted.
    """

    key: str
    part: str
    signature: type
    runs_in: str
    awaited: tuple[str, ...] = ()
    may_be_async: bool = False

    @property
    def arguments(self) -> dict[str, str]:
        """Positional arguments: name → type."""
        _, *arguments = inspect.signature(self.signature.__call__).parameters.values()
        return {argument.name: argument.annotation for argument in arguments}

    @property
    def result(self) -> str:
        """Type of the result, which the caller awaits if the part is asynchronous."""
        return str(inspect.signature(self.signature.__call__).return_annotation)

    @property
    def is_async(self) -> bool:
        """Whether the part must be an ``async`` function."""
        return inspect.iscoroutinefunction(self.signature.__call__)

    @property
    def spelt(self) -> str:
        """Arguments as they stand in a function definition."""
        return f"({', '.join(f'{name}: {kind}' for name, kind in self.arguments.items())})"


def load_named(interface: Interface, ours: Mapping[str, str], name: str) -> Any:
    """Return the part that a key names: one of ``ours`` (name → ``module:name``, see `imported`), or the user's own.

    Raises:
        UserError: as for `load`.
    """
    return load(interface, name) if is_path(name) else imported(ours[name])


def imported(path: str) -> Any:
    """Import a ``module:name`` of this package."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def load(interface: Interface, path: str) -> Callable[..., Any]:
    """Import the user's own part that a key names. Modules are looked up on ``sys.path`` and in the current folder.

    Raises:
        UserError: it cannot be imported, or does not have the interface.
    """
    key = interface.key
    if not is_path(path):
        raise UserError(f"{key}={path} is neither a built-in name nor package.module:name.")
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
        raise UserError(f"{where} must take {interface.spelt}: {error}.") from None
    except ValueError:  # some builtins have no signature
        pass
    if _is_async(found) != interface.is_async and not interface.may_be_async:
        must = "must be an async function" if interface.is_async else "must not be an async function"
        raise UserError(f"{where} {must}, as it is {'' if interface.is_async else 'not '}awaited; correct it.")
    for name in interface.awaited if isinstance(found, type) else ():
        if not _is_async(getattr(found, name, None)):
            raise UserError(f"{where} has no async method {name}; add it.")


def _is_async(found: Any) -> bool:
    """Return whether calling ``found`` gives a coroutine, as far as its definition tells."""
    called = type(found).__call__ if callable(found) else None
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(called)


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
