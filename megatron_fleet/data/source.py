"""Task sources: a file on a disk or on S3, the embedded fleet, or a folder written by `mfleet data prepare`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_fleet
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_json, read_file, user_path
from megatron_fleet.data import prepared
from megatron_fleet.data.manifest import SplitManifest

EMBEDDED = "embedded"
"""Name that stands for the embedded fleet's own task file in place of a path."""


@dataclass(frozen=True, slots=True)
class Source:
    """Contents of a task source.

    Attributes:
        address: as given.
        sha256: hexadecimal hash of the file's bytes, or of a prepared folder's ``split.json``, which has the hashes of
            its files.
        rows: unvalidated rows of the file.
        manifest: split manifest of a prepared folder.
    """

    address: str
    sha256: str
    rows: list[Any]
    manifest: SplitManifest | None = None


def read_source(address: str | Path) -> Source:
    """Read the rows of a task file or of a prepared folder.

    Raises:
        UserError: it cannot be read, is not JSON, or is not a list of tasks.
    """
    address = str(address)
    if is_prepared(address):
        data, rows = prepared.read(address)
        return Source(address, hashlib.sha256(data).hexdigest(), rows, SplitManifest.parse(data, address))
    data = read_bytes(address)
    return Source(address, hashlib.sha256(data).hexdigest(), _rows(data, address))


def is_prepared(address: str) -> bool:
    """Return whether an address is a prepared folder. On S3 everything that does not end with ``.json`` is."""
    if "://" in address:
        return not address.endswith(".json")
    return address != EMBEDDED and user_path(address).is_dir()


def read_bytes(address: str, key: str = "data.tasks") -> bytes:
    """Read a whole file: local (``~`` expanded), on S3, or the embedded fleet's own.

    Args:
        key: configuration key that gave the address.

    Raises:
        UserError: the file cannot be read.
    """
    if "://" in address:
        from megatron_fleet.storage.open import open_folder

        if address.count("/") < 3:
            raise UserError(f"{key}={address}: names no file in a bucket; write s3://bucket/file.json.")
        folder, _, name = address.rpartition("/")
        return open_folder(folder).read(name)
    if address == EMBEDDED:
        file = Path(megatron_fleet.__file__).parent / "embedded_fleet" / "tasks.json"
    else:
        file = user_path(address)
    return read_file(file, f"correct {key}")


def _rows(data: bytes, file: str) -> list[Any]:
    content = parse_json(data, file)
    rows = content.get("tasks") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise UserError(f'{file}: expected a list of tasks, or an object with such a list under "tasks".')
    if not rows:
        raise UserError(f"{file}: holds no task.")
    return rows
