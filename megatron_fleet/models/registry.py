"""Registry of model families: each folder here with a ``weights.py`` or a ``chat.py``, and the user's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.extension import Interface, load
from megatron_fleet.models.architecture import Architecture
from megatron_fleet.models.families import family_modules

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


class FamilyFactory(Protocol):
    def __call__(self, /) -> Family:
        """Return what a folder in ``models/`` provides: the architectures, and chat formats if they are its own."""
        ...


OWN_FAMILY = Interface("model.family", "model family", FamilyFactory, "every process that reads a model")


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
    family = load(OWN_FAMILY, path)()
    if not isinstance(family, Family):
        raise UserError(f"model.family={path} returned {type(family).__name__}; it must return a Family.")
    register(*family.architectures)
    OWN_FAMILIES[path] = family
    os.environ[FAMILY] = path


def family_environment(path: str | None) -> dict[str, str]:
    """Return the variable by which a process that does not inherit ours adds the family; none for ``None``."""
    return {} if path is None else {FAMILY: path}


for _module in family_modules("weights"):
    register(*_module.ARCHITECTURES)
use_family(os.environ.get(FAMILY) or None)
