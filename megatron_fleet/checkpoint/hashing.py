"""Comparison of files with the SHA-256 in their manifest, several at a time."""

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

from megatron_fleet.checkpoint.manifest import MANIFEST
from megatron_fleet.config.errors import UserError, say

_BLOCK = 4 << 20
_LONG = 1 << 30
"""Size in bytes from which progress is shown: about a second on one core."""
_MOST_THREADS = 32


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
    with _progress(folder.name, total) as advance, ThreadPoolExecutor(threads) as pool:
        try:
            found = pool.map(lambda name: _sha256(folder / name, advance, ended), files)
            for (name, entry), sha256 in zip(files.items(), found, strict=True):
                if sha256 != entry["sha256"]:
                    raise UserError(f"{folder / name}: is damaged, its SHA-256 is not that of the {MANIFEST}.")
        except BaseException:
            failed.set()  # leaving the pool waits for its threads
            raise


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
        raise UserError(f"{file}: cannot be read ({error.strerror}).") from None
    return digest.hexdigest()


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, a line elsewhere; yields a function that counts bytes."""
    if total < _LONG or not sys.stderr.isatty():
        if total >= _LONG:
            say(f"checking {name}: {total / 1e9:.1f} GB", sys.stderr)
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("checking {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda count: bar.advance(task, count)
