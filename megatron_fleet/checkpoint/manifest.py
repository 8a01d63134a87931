"""The manifest of a checkpoint, every file with its size and SHA-256, and the comparison of files with it."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_fleet.config import units
from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.files import parse_json, read_file

MANIFEST = "manifest.json"
MAX_NAME = 255
"""Maximum length in bytes of a file name on Linux."""
_BLOCK = 4 << 20
_LONG = 1 << 30
"""Size in bytes from which progress is shown: about a second on one core."""
_MOST_THREADS = 32


class DamagedCheckpoint(UserError):
    """A checkpoint is not as it was written; another one may be good."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest. Raises UserError when it is missing or not in this version's format."""
    file = folder / MANIFEST
    if not file.is_file():
        raise UserError(f"{folder} is not a checkpoint, {MANIFEST} is missing (an interrupted save has none).")
    return parse_manifest(read_file(file, "use another checkpoint"), str(file))


def parse_manifest(data: bytes, where: str) -> dict[str, Any]:
    """Parse a manifest. Raises UserError, beginning with ``where``, when it is not in this version's format."""
    try:
        manifest = parse_json(data, where, "use another checkpoint")
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from None
    try:
        if manifest["format"] != 1:
            raise DamagedCheckpoint(f"{where}: format is {manifest['format']}, this version reads 1.")
        for name, entry in manifest["files"].items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{name} lies outside the checkpoint")
            if "\0" in name or any(len(part.encode()) > MAX_NAME for part in Path(name).parts):
                raise ValueError(f"{name[:60]!r} cannot be the name of a file")
            if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
                raise ValueError(f"{name} has no size or checksum")
        if type(manifest["step"]) is not int:
            raise ValueError("step is not an integer")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DamagedCheckpoint(f"{where}: malformed ({type(e).__name__}: {e}); use another checkpoint.") from None
    return dict(manifest)


def check_hashes(folder: Path, files: Mapping[str, Mapping[str, Any]], stop: threading.Event) -> None:
    """Compare every file of a manifest.

    Args:
        files: by name below ``folder``: ``{"bytes": int, "sha256": hex}``.
        stop: ends the work early when another thread sets it.

    Raises:
        UserError: naming the first file that differs or cannot be read.
        CancelledError: ``stop`` was set.
    """
    total, failed = sum(entry["bytes"] for entry in files.values()), threading.Event()

    def ended() -> bool:
        return stop.is_set() or failed.is_set()

    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with progress("checking", folder.name, total) as advance, ThreadPoolExecutor(threads) as pool:
        try:
            found = pool.map(lambda name: _sha256(folder / name, advance, ended), files)
            for (name, entry), sha256 in zip(files.items(), found, strict=True):
                if sha256 != entry["sha256"]:
                    raise DamagedCheckpoint(f"{folder / name} is damaged, its SHA-256 is not that of the {MANIFEST}.")
        except BaseException:
            failed.set()  # leaving the pool waits for its threads
            raise


def is_whole(folder: Path, name: str, entry: Mapping[str, Any], stop: threading.Event) -> bool:
    """Whether a file of a manifest is there as it says. See `check_hashes`."""
    file = folder / name
    if not file.is_file() or file.stat().st_size != entry["bytes"]:
        return False
    return _sha256(file, lambda count: None, stop.is_set) == entry["sha256"]


def _sha256(file: Path, advance: Callable[[int], None], ended: Callable[[], bool]) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    try:
        with file.open("rb", buffering=0) as source:
            while count := source.readinto(buffer):
                if ended():
                    raise CancelledError
                digest.update(buffer[:count])
                advance(count)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    return digest.hexdigest()


@contextmanager
def progress(verb: str, name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, a line elsewhere; yields a function that counts bytes, for any thread."""
    if total < _LONG or not sys.stderr.isatty():
        if total >= _LONG:
            say(f"{verb} {name}: {units.size(total)}", sys.stderr)
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{verb} {name}", total=total)
        yield lambda count: bar.advance(task, count)
