"""Background uploads of finished files to a store. A failed copy is logged and counted, never raised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
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
        self._folder: Folder = open_folder(url)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="uploads")
        self._pending: list[Future[None]] = []
        self._counting = threading.Lock()
        self._failed = 0

    @property
    def failed(self) -> int:
        """Number of files that failed so far."""
        with self._counting:
            return self._failed

    def add(self, files: Mapping[str, Path], prefix: str) -> None:
        """Schedule copies of ``files`` to ``prefix/name``; the files must not change any more."""
        self._pending = [job for job in self._pending if not job.done()]
        self._pending += [self._thread.submit(self._copy, path, f"{prefix}/{name}") for name, path in files.items()]

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait for pending copies, at most ``timeout_s``. Idempotent."""
        left = wait(self._pending, timeout_s).not_done
        self._thread.shutdown(wait=False, cancel_futures=True)
        if left:
            log.warning(
                "%d files did not get to %s within %g s; they are here still", len(left), self._folder.url, timeout_s
            )
        self._pending = []

    def _copy(self, path: Path, name: str) -> None:
        try:
            size = path.stat().st_size
            transfer(LocalFolder(path.parent, cached=True), self._folder, [Copy(path.name, name, size)])
        except (UserError, OSError) as error:
            with self._counting:
                self._failed += 1
                first = self._failed == 1
            if first:
                log.warning(
                    "%s was not copied to the store and stays here alone; later ones are only counted: %s", path, error
                )
