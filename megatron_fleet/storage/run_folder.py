"""Output folder of a run: its id, written down there, and the lock that keeps a second process out."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
from pathlib import Path
from types import TracebackType

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.storage.local import os_errors_as_user_error, sync_folder

IDENTITY = "run.json"
"""File with the id; never replaced, because the lock is on it."""
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
"""An id is part of paths, addresses and names at trackers."""
MAX_NAME = 100
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

log = logging.getLogger(__name__)


class RunFolder:
    """A run's output folder, used by this process alone until it is closed or the process ends.

    Attributes:
        id: ``<name>_<8 hex digits>`` or as the user chose, equal for all attempts at the run. Everything that the run
            stores elsewhere is below it.
    """

    def __init__(self, folder: Path, name: str, wanted: str | None = None) -> None:
        """Lock the folder, which is made if missing; a new one gets an id.

        Args:
            name: of the run, see `new_id`.
            wanted: ``run.id``; ``None``: as the folder has it.

        Raises:
            UserError: another process uses the folder, it belongs to another run, or it cannot be written.
        """
        file = folder / IDENTITY
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise UserError(f"{file} cannot be written ({error.strerror}); choose another run.out.") from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise UserError(f"{file} is not a regular file; remove it, or choose another run.out.")
            self._lock(folder)
            if not os.fstat(self._fd).st_size:  # only who has the lock writes, so all see one id
                self._write(folder, wanted or new_id(name), name)
            self.id = self._read(file)
            if wanted not in (None, self.id):
                raise UserError(
                    f"run.id={wanted}: {folder} belongs to the run {self.id}; choose another run.out, or leave out "
                    f"run.id to resume that run."
                )
        except BaseException:
            self.close()
            raise

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process is using this folder; wait until it has ended, or choose another run.out."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s: the file system does not support locks; do not start a second run in this folder", folder)

    def _write(self, folder: Path, made: str, name: str) -> None:
        data = (json.dumps({"id": made, "name": name}) + "\n").encode()
        with os_errors_as_user_error(folder / IDENTITY, "written", len(data)):
            os.write(self._fd, data)
            os.fsync(self._fd)
            sync_folder(folder)

    @staticmethod
    def _read(file: Path) -> str:
        remedy = "restore it, or choose another run.out"
        found = read_object(file, remedy).get("id")
        if not isinstance(found, str) or not ID.fullmatch(found):
            raise UserError(f"{file}: id is {str(found)[:60]!r}, which is not a valid run id; {remedy}.")
        return found

    def close(self) -> None:
        """Release the folder. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def new_id(name: str) -> str:
    """Make an id of a run's name, in which other characters than those of `ID` become ``-``."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-._')[:MAX_NAME] or 'run'}_{secrets.token_hex(4)}"


def in_use(folder: Path) -> bool:
    """Whether a process uses a run's folder now; ``False`` where the file system has no locks."""
    try:
        with open(folder / IDENTITY, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False
