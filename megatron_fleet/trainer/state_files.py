"""Files of checkpoints on hosts that do not share a folder with the controller, copied by the ranks there.

Each host sends what its own ranks wrote to the store, and fetches whole checkpoints from there, because a rank of
another layout needs parts of any file.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.local import LocalFolder, begin_folder, commit_folder, fingerprint
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.transfer import Copy, Throttle, transfer

FETCHED = ".fetched"
"""Suffix of the hidden name of a folder that `fetch` has filled."""


def own_files(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Files that a rank has written, of those of a checkpoint; the first one also wrote what describes the whole."""
    shards = {name: name.partition("__")[2].partition("_")[0] for name in sizes}
    return {name: size for name, size in sizes.items() if shards[name] == str(rank) or (not shards[name] and not rank)}


def send(
    folder: Path, url: str, sizes: Mapping[str, int], bytes_per_s: float | None, stop: threading.Event
) -> list[str]:
    """Copy those of the files to ``url`` that lie in ``folder`` whole; their names.

    Raises:
        UserError: the disk or the store refuses.
        CancelledError: ``stop`` was set.
    """
    here = LocalFolder(folder, cached=True)  # written a moment ago
    there = here.sizes()
    copies = [Copy(name, name, size) for name, size in sizes.items() if there.get(name) == size]
    transfer(here, open_folder(url), copies, None if bytes_per_s is None else Throttle(bytes_per_s), stop)
    return [copy.source for copy in copies]


def fetched(path: Path) -> Path:
    """Folder that `fetch` fills, beside ``path``: what has that name itself is of a controller that ran here once."""
    return path.with_name(f".{path.name}{FETCHED}")


def fetch(url: str, path: Path, files: Mapping[str, Mapping[str, Any]], stop: threading.Event) -> None:
    """Copy a checkpoint to the folder `fetched` and compare it with the entries of its manifest.

    Raises:
        UserError: the disk or the store refuses, or a file is damaged.
        CancelledError: ``stop`` was set.
    """
    final = fetched(path)
    if not _is_whole(final, files):
        partial = begin_folder(final)
        copies = [Copy(name, name, entry["bytes"]) for name, entry in files.items()]
        transfer(open_folder(url), LocalFolder(partial), copies, stop=stop)
        if not _is_whole(partial, files):
            raise UserError(
                f"{url} is damaged, or was damaged during the download; try again, or use another checkpoint."
            )
        commit_folder(partial, final)


def clear(folder: Path) -> None:
    """Remove what `fetch` and unfinished saves have left in a folder of checkpoints."""
    for path in folder.glob(".*step_*"):
        shutil.rmtree(path, ignore_errors=True)


def _is_whole(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a folder holds all files of a manifest as it says."""
    there = LocalFolder(folder).sizes()
    return all(there.get(name) == entry["bytes"] for name, entry in files.items()) and all(
        fingerprint(folder / name)["sha256"] == entry["sha256"] for name, entry in files.items()
    )
