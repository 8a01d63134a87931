"""Registry of model families: each folder here with a ``weights.py`` or a ``chat.py``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

from megatron_fleet import models
from megatron_fleet.models.architecture import Architecture


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


for _module in family_modules("weights"):
    register(*_module.ARCHITECTURES)
