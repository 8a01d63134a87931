"""Background uploads of finished files to a store. A failed copy is logged and counted, never raised."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import Folder
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.transfer import Copy, transfer

CLOSE_TIMEOUT_S = 300.0
"""Maximum wait at the end of a run; files not copied by then are not uploaded."""

log = logging.getLogger(__name__)


class Uploads:
    """Sequential background copies into one folder. Used by one thread."""

    def __init__(self, url: str) -> None:
        """Open the folder, without a request to the store yet. Raises UserError if ``url`` is not a folder address."""
        self._url = url.rstrip("/")
        self._folder: Folder = open_folder(self._url)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="uploads")
        self._pending: list[Future[object]] = []
        self._counting = threading.Lock()
        self._failed = 0
        self._known: dict[str, set[str]] = {}  # of the thread

    @property
    def failed(self) -> int:
        """Number of files that failed so far."""
        with self._counting:
            return self._failed

    def add(self, files: Mapping[str, Path], prefix: str) -> None:
        """Schedule copies of ``files`` to ``prefix/name``; the files must not change any more."""
        self._pending = [job for job in self._pending if not job.done()]
        self._pending += [self._thread.submit(self._copy, path, f"{prefix}/{name}") for name, path in files.items()]

    def add_once(self, files: Mapping[str, Path], prefix: str) -> None:
        """Schedule copies of ``files``, whose names follow from their content, unless the store has them."""
        if files:
            self.run(lambda: self._copy_missing(files, prefix))

    def run(self, action: Callable[[], None]) -> None:
        """Schedule an action after the copies that were scheduled before."""
        self._pending = [job for job in self._pending if not job.done()]
        self._pending.append(self._thread.submit(action))

    def stored(self, prefix: str) -> Mapping[str, int]:
        """Return the names and sizes of the files below ``prefix``. Raises UserError when the store refuses."""
        return open_folder(f"{self._url}/{prefix}").sizes()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for pending copies, at most ``timeout_s``. Idempotent."""
        left = wait(self._pending, timeout_s).not_done
        self._thread.shutdown(wait=False, cancel_futures=True)
        if left:
            log.warning(
                "%d files were not uploaded to %s within %g s; they are still on this machine",
                len(left),
                self._folder.url,
                timeout_s,
            )
        self._pending = []

    def _copy_missing(self, files: Mapping[str, Path], prefix: str) -> None:
        if prefix not in self._known:
            with contextlib.suppress(UserError):  # a store that does not answer now may do so for the copies
                self._known[prefix] = set(self.stored(prefix))
        known = self._known.get(prefix, set())
        for name, path in files.items():
            if name not in known and self._copy(path, f"{prefix}/{name}"):
                known.add(name)

    def _copy(self, path: Path, name: str) -> bool:
        """Copy a file; return whether it is in the store now."""
        try:
            size = path.stat().st_size
            transfer(LocalFolder(path.parent, cached=True), self._folder, [Copy(path.name, name, size)])
            return True
        except (UserError, OSError) as error:
            with self._counting:
                self._failed += 1
                first = self._failed == 1
            if first:
                log.warning(
                    "%s was not copied to the store and is on this machine only; later failures are only counted: %s",
                    path,
                    error,
                )
            return False
