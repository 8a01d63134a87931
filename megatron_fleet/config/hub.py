"""Models by their id on the Hugging Face hub, as ``Qwen/Qwen3-8B@main``: the id, and where its files are here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_REVISION = "main"
_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub.

    Attributes:
        repo: ``organisation/name``.
        revision: a branch, a tag or a commit.
    """

    repo: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def storage(self, environ: Mapping[str, str]) -> Path:
        """Folder of this model in the hub's cache, with the files of all its revisions."""
        return cache_folder(environ) / f"models--{self.repo.replace('/', '--')}"

    def folder(self, environ: Mapping[str, str]) -> Path:
        """Folder of this revision's files. It may not exist yet; that of a branch is known once it was downloaded."""
        storage, commit = self.storage(environ), self.revision
        if not self.pinned and (reference := storage / "refs" / self.revision).is_file():
            commit = reference.read_text(encoding="utf-8").strip()
        return storage / "snapshots" / commit


def hub_model(path: str) -> HubModel | None:
    """Return the model that ``model.path`` names if it has the form of a hub id, else ``None``.

    A relative path of two parts looks the same: `config.load` makes those that exist absolute before.
    """
    found = _ID.fullmatch(path)
    return None if found is None else HubModel(found["repo"], found["revision"] or DEFAULT_REVISION)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Folder of all models from the hub, by the variables that huggingface_hub reads."""
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or str(Path(home, "hub"))
    return Path(os.path.expandvars(cache)).expanduser().absolute()
