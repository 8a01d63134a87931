"""The manifest of a checkpoint: every file with its size and SHA-256."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object

MANIFEST = "manifest.json"
MAX_NAME = 255
"""Maximum length in bytes of a file name on Linux."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest. Raises UserError when it is missing or not in this version's format."""
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(f"{folder}: is no checkpoint, {MANIFEST} is missing (an interrupted save has none).")
    try:
        manifest = read_object(file, "use another checkpoint")
        if manifest["format"] != 1:
            raise UserError(f"{file}: format is {manifest['format']}, this version reads 1.")
        for name, entry in manifest["files"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name} lies outside the checkpoint")
            if "\0" in name or any(len(part.encode()) > MAX_NAME for part in Path(name).parts):
                raise ValueError(f"{name[:60]!r} cannot be the name of a file")
            if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
                raise ValueError(f"{name} has no size or checksum")
        if type(manifest["step"]) is not int:
            raise ValueError("step is no integer")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file}: malformed ({type(e).__name__}: {e}); use another checkpoint.") from None
    return manifest


def write_json(file: Path, value: Any) -> None:
    """Write JSON and flush it to disk."""
    with file.open("w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
        f.flush()
        os.fsync(f.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (names, renames) to disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
