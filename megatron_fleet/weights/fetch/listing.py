"""Files of a remote model that a run needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.config.remote_model import RemoteModel

NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
"""Files of a model that something here reads; repositories also hold other formats of the weights."""
WEIGHTS = "*.safetensors"


@dataclass(frozen=True, slots=True)
class Listing:
    """A model as its source lists it: its revision, and the size in bytes of each file that a run needs."""

    model: RemoteModel
    sizes: Mapping[str, int]

    def missing_bytes(self) -> int:
        """Bytes that are not here yet."""
        folder = self.model.folder(os.environ)
        return sum(size for name, size in self.sizes.items() if not (folder / name).is_file())


def is_needed(name: str) -> bool:
    """Whether a run needs the file of a model with this name."""
    return "/" not in name and any(Path(name).match(pattern) for pattern in NEEDED)


def has_weights(names: Iterable[str]) -> bool:
    """Whether files with weights are among them."""
    return any(Path(name).match(WEIGHTS) for name in names)
