"""Registry of model families: each folder here with a ``weights.py`` or a ``chat.py``, and the user's own."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from megatron_fleet import models
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import load
from megatron_fleet.models.architecture import Architecture

if TYPE_CHECKING:
    from megatron_fleet.models.chat.format import ModelFolder, NamedFormat

FAMILY = "MFLEET_MODEL_FAMILY"
"""Environment variable with ``model.family``, by which child processes know the user's family."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family of the user's; the same as a folder here.

    Attributes:
        architectures: of its ``weights.py``.
        formats, recognise: of its ``chat.py``; without them its models use the chat format of another family.
    """

    architectures: tuple[Architecture, ...]
    formats: Mapping[str, NamedFormat] = field(default_factory=dict)
    recognise: Callable[[ModelFolder], str | None] = lambda folder: None


def family_modules(part: str) -> Iterator[ModuleType]:
    """Import the module ``part`` (``weights`` or ``chat``) of each family, in alphabetical order of the folders."""
    for found in sorted(pkgutil.iter_modules(models.__path__), key=lambda module: module.name):
        name = f"{models.__name__}.{found.name}"
        if found.ispkg and find_spec(f"{name}.{part}") is not None:
            yield importlib.import_module(f"{name}.{part}")


_ARCHITECTURES: dict[str, Architecture] = {}
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_ARCHITECTURES)
"""Architectures by the ``model_type`` of ``config.json``."""


def register(*architectures: Architecture) -> None:
    """Add architectures, of the families here or of a package of the user's, in the process that calls."""
    _ARCHITECTURES.update({name: architecture for architecture in architectures for name in architecture.model_types})


OWN_FAMILIES: dict[str, Family] = {}
"""Families of the user's in this process, by their path."""


def use_family(path: str | None) -> None:
    """Add the family that ``model.family`` names, in this process and in the children that it starts.

    Raises:
        UserError: it cannot be loaded, or is no `Family`.
    """
    if path is None or path in OWN_FAMILIES:
        return
    family = load("model.family", path)()
    if not isinstance(family, Family):
        raise UserError(f"model.family={path}: gave {type(family).__name__}; it must give a Family.")
    register(*family.architectures)
    OWN_FAMILIES[path] = family
    os.environ[FAMILY] = path


def family_environment(path: str | None) -> dict[str, str]:
    """Return the variable by which a process that does not inherit ours adds the family; none for ``None``."""
    return {} if path is None else {FAMILY: path}


for _module in family_modules("weights"):
    register(*_module.ARCHITECTURES)
use_family(os.environ.get(FAMILY) or None)
