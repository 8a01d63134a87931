"""Files below a folder with their sizes and SHA-256 checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any


def list_files(folder: Path) -> list[Path]:
    """List every file below a folder, in an order that is equal on all ranks."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def fingerprint(file: Path, flush: bool = False) -> dict[str, Any]:
    """``bytes`` and ``sha256`` of a file; with ``flush`` it is on disk when this returns."""
    with file.open("rb") as f:
        if flush:
            os.fsync(f.fileno())
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        return {"bytes": f.tell(), "sha256": digest}
