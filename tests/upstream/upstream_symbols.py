"""What is known of a name of another package, whoever tells: its sources, or a record of them.

A name is written ``module:path``, as in ``vllm.v1.engine.async_llm:AsyncLLM().sleep``. ``()`` after a class stands for
an instance of it, ``[]`` for an item of a container.
"""

from __future__ import annotations

import ast
import functools
import inspect
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["module", "class", "function", "value", "unknown"]


class Missing(LookupError):
    """There is no such name."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One name.

    Attributes:
        kind: ``unknown`` where it may exist, but the sources at hand do not tell.
        parameters: of a call, as in a ``def``, with ``...`` for every default and without a bound first one; ``None``
            where the sources do not tell.
        holds: the module it is, the instance that it holds, or the one that a call returns.
    """

    kind: Kind
    parameters: str | None = None
    holds: str | None = None

    @property
    def signature(self) -> inspect.Signature | None:
        """`parameters`, to bind the arguments of a call."""
        return None if self.parameters is None else _parsed(self.parameters)


class Symbols(Protocol):
    """Names of some packages."""

    def has(self, package: str) -> bool:
        """Whether a package (a name without dots) is among them."""

    def lookup(self, target: str) -> Symbol:
        """Look a name up. Raises Missing."""


class Together:
    """Names of several `Symbols`; those of a package come from the first that has it."""

    def __init__(self, *parts: Symbols) -> None:
        self._parts = parts

    def has(self, package: str) -> bool:
        return any(part.has(package) for part in self._parts)

    def lookup(self, target: str) -> Symbol:
        package = package_of(target)
        for part in self._parts:
            if part.has(package):
                return part.lookup(target)
        raise Missing(f"there is no package {package}")


def package_of(target: str) -> str:
    """The first part of a module's name."""
    return target.partition(":")[0].partition(".")[0]


def signature(arguments: ast.arguments, *, drop_first: bool = False) -> inspect.Signature:
    """The parameters of a ``def``; every default becomes ``...``."""
    kinds = inspect.Parameter
    positional = [
        *((each, kinds.POSITIONAL_ONLY) for each in arguments.posonlyargs),
        *((each, kinds.POSITIONAL_OR_KEYWORD) for each in arguments.args),
    ]
    required = len(positional) - len(arguments.defaults)
    found = [kinds(a.arg, k, default=kinds.empty if i < required else ...) for i, (a, k) in enumerate(positional)]
    if drop_first:
        found = found[1:]
    if arguments.vararg:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(each.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else ...))
    if arguments.kwarg:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


@functools.cache
def _parsed(parameters: str) -> inspect.Signature:
    (function,) = ast.parse(f"def _({parameters}): ...").body
    assert isinstance(function, ast.FunctionDef)
    return signature(function.args)


def written(parameters: inspect.Signature) -> str:
    """The text of `Symbol.parameters`."""
    return str(parameters).removeprefix("(").removesuffix(")").replace("=Ellipsis", "=...")
