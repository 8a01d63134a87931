"""The folders of the model families here, and their modules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

from megatron_fleet import models


def family_modules(part: str) -> Iterator[ModuleType]:
    """Import the module ``part`` (``weights`` or ``chat``) of each family, in alphabetical order of the folders."""
    for found in sorted(pkgutil.iter_modules(models.__path__), key=lambda module: module.name):
        name = f"{models.__name__}.{found.name}"
        if found.ispkg and find_spec(f"{name}.{part}") is not None:
            yield importlib.import_module(f"{name}.{part}")
