"""Manifest of a version on disk. Nothing here imports torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Folder

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class BucketFile:
    """One safetensors file.

    Attributes:
        checksum: checksum of its bytes, zero-padded to a multiple of 8; see `buckets.checksum`.
        names: names of its tensors.
    """

    file: str
    nbytes: int
    checksum: int
    names: list[str]


def write_manifest(version: int, files: list[BucketFile]) -> bytes:
    """Serialise the content of ``manifest.json``."""
    return json.dumps({"version": version, "files": [asdict(file) for file in files]}).encode()


def read_manifest(folder: Folder) -> list[BucketFile]:
    """Read the files of a version. Raises UserError if it is incomplete, or not a version of weights."""
    content = folder.read(MANIFEST)
    try:
        return [BucketFile(**entry) for entry in json.loads(content)["files"]]
    except (ValueError, TypeError, KeyError) as e:
        raise UserError(f"{folder.join(MANIFEST)}: no manifest of weights ({e}); sync the weights again.") from None
