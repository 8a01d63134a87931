"""Folder of many files that appears whole or not at all.

On a disk the files are written to ``.NAME.partial`` next to the final folder, which takes its name by one rename. An
object store has no rename: there the files go to their final keys, and the folder exists once its marker file does.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Protocol

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Folder, check_name
from megatron_fleet.storage.local import (
    UNFINISHED,
    LocalFolder,
    is_unfinished,
    os_errors_as_user_error,
    remove_unfinished,
    sync_folder,
    write_atomically,
)
from megatron_fleet.storage.remote import RemoteFolder

log = logging.getLogger(__name__)


class Staging(Protocol):
    """Folder under construction. Several processes may fill it; the last one commits it, or all of them do.

    After a crash at any moment a new ``Staging`` of the same address finds either ``exists()`` or, in
    ``folder.sizes()``, the files that had been finished.
    """

    url: str
    """Final address of the folder."""
    folder: Folder
    """Folder to write its files to, all but the marker."""

    def exists(self) -> bool:
        """Whether the finished folder exists. Raises UserError when something else is in its place."""
        ...

    def commit(self, data: bytes) -> None:
        """Write the marker file and make the folder visible, durably; remove what killed writers left in it.

        All other files must be finished. When the folder already exists with the same marker, because another process
        has committed it, nothing else happens.

        Raises:
            UserError: something else is at the address; it stays as it is.
        """
        ...


class LocalStaging:
    """``Staging`` on a file system."""

    def __init__(self, final: Path, marker: str) -> None:
        self.url = str(final)
        self._final = Path(os.path.abspath(final))
        if not self._final.name:
            raise UserError(f"{final} is the root of the file system; name a folder in it.")
        self._partial = self._final.with_name(f".{self._final.name}{UNFINISHED}")
        self._marker = check_name(marker)
        self.folder: Folder = LocalFolder(self._partial)

    def exists(self) -> bool:
        with os_errors_as_user_error(self._final, "listed"):
            taken = self._final.exists() and not (self._final.is_dir() and next(self._final.iterdir(), None) is None)
            # After the look at the folder: another process may rename its own, which has the marker, to here meanwhile.
            if (self._final / self._marker).is_file():
                return True
            if taken:
                raise self._foreign()
        return False

    def commit(self, data: bytes) -> None:
        with os_errors_as_user_error(self._final, "committed", len(data)):
            try:
                self._commit(data)
            except OSError:
                # The other process may rename at any moment: the current state matters more than the error.
                if not self._final.exists():
                    raise
        self._check_committed(data)
        # Another process may have begun a file between the sweep and the rename.
        _sweep(self._final)
        shutil.rmtree(self._partial, ignore_errors=True)

    def _commit(self, data: bytes) -> None:
        parent = self._final.parent
        _sweep(self._partial)
        # Not in the folder, which another process may sweep or rename concurrently.
        beside = parent / f"{self._final.name}.{Path(self._marker).name}"
        remove_unfinished(parent, beside.name)
        write_atomically(self._partial / self._marker, data, beside)
        self._partial.rename(self._final)
        sync_folder(parent)

    def _check_committed(self, data: bytes) -> None:
        found = self._final / self._marker
        with os_errors_as_user_error(found, "read"):
            if not found.is_file() or found.read_bytes() != data:
                raise self._foreign()

    def _foreign(self) -> UserError:
        return UserError(f"{self.url}: something else is at this path; remove it or choose another one.")


def _sweep(folder: Path) -> None:
    """Remove unfinished files."""
    for path in folder.rglob("*"):
        if is_unfinished(path.name):
            path.unlink(missing_ok=True)


class StoreStaging:
    """``Staging`` in an object store: readers look for the marker, which is written atomically to its final key."""

    def __init__(self, folder: RemoteFolder, marker: str) -> None:
        self.url = folder.url
        self._folder = folder
        self._marker = check_name(marker)
        self.folder: Folder = folder

    def exists(self) -> bool:
        return self._folder.size(self._marker) is not None

    def commit(self, data: bytes) -> None:
        if not self._folder.write_new(self._marker, data) and self._folder.read(self._marker) != data:
            raise UserError(f"{self.url}: something else is at this path; remove it or choose another one.")
        try:
            self._folder.abort_uploads()
        except UserError as e:
            # Some identities may not list uploads; the folder is committed all the same.
            log.warning("unfinished uploads, if any, stay in the store: %s", e)
