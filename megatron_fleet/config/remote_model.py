"""Models that are not on this host yet: what ``model.path`` names, and where the files are once they are here.

``Qwen/Qwen3-8B@main`` is a model on the Hugging Face hub, ``s3://bucket/prefix`` or ``gs://bucket/prefix`` a folder in
an object store.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

DEFAULT_REVISION = "main"
LATEST = "latest"
CONTENT_DIGITS = 16
"""Hexadecimal digits that identify the content of a model in a bucket."""
_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-]+(/[\w.-]+)*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ADDRESS = re.compile(rf"(?P<address>(s3|gs)://[^/@]+(/.*?)?)/*(@(?P<revision>[0-9a-f]{{{CONTENT_DIGITS}}}))?")


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
    def name(self) -> str:
        return PurePosixPath(self.repo).name

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubModel:
        return replace(self, revision=revision)

    def storage(self, environ: Mapping[str, str]) -> Path:
        """Folder of this model in the hub's cache, with the files of all its revisions."""
        return cache_folder(environ) / f"models--{self.repo.replace('/', '--')}"

    def folder(self, environ: Mapping[str, str]) -> Path:
        """Folder of this revision's files. It may not exist yet; that of a branch is known once it was downloaded."""
        return _folder(self, environ)


@dataclass(frozen=True, slots=True)
class BucketModel:
    """A model in an object store.

    Attributes:
        address: ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
        revision: `CONTENT_DIGITS` that identify the content (`weights.fetch.object_store.look_up`), or `LATEST`.
    """

    address: str
    revision: str = LATEST

    def __str__(self) -> str:
        return f"{self.address}@{self.revision}" if self.pinned else self.address

    @property
    def name(self) -> str:
        return PurePosixPath(self.address).name

    @property
    def pinned(self) -> bool:
        """Whether the content is known, so that other content is refused."""
        return self.revision != LATEST

    def at(self, revision: str) -> BucketModel:
        return replace(self, revision=revision)

    def storage(self, environ: Mapping[str, str]) -> Path:
        """Folder of this model, with the files of all its revisions, beside the hub's models."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "--", self.address)[:100]
        return cache_folder(environ) / f"{readable}--{hashlib.sha256(self.address.encode()).hexdigest()[:8]}"

    def folder(self, environ: Mapping[str, str]) -> Path:
        """Folder of this revision's files. It may not exist yet; that of `LATEST` is known once it was downloaded."""
        return _folder(self, environ)


RemoteModel = HubModel | BucketModel


def remote_model(path: str) -> RemoteModel | None:
    """Return the model that ``model.path`` names if it has the form of a hub id or of an address, else ``None``.

    A relative path of two parts looks like a hub id: `config.load` makes those that exist absolute before.
    """
    if (found := _ADDRESS.fullmatch(path)) is not None:
        return BucketModel(found["address"], found["revision"] or LATEST)
    found = _ID.fullmatch(path)
    return None if found is None else HubModel(found["repo"], found["revision"] or DEFAULT_REVISION)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Folder of all downloaded models, by the variables that huggingface_hub reads."""
    home = environ.get("HF_HOME") or str(Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or str(Path(home, "hub"))
    return Path(os.path.expandvars(cache)).expanduser().absolute()


def _folder(model: RemoteModel, environ: Mapping[str, str]) -> Path:
    storage, revision = model.storage(environ), model.revision
    if not model.pinned and (reference := storage / "refs" / revision).is_file():
        revision = reference.read_text(encoding="utf-8").strip()
    return storage / "snapshots" / revision
