"""A folder on a file system that this machine sees; files and folders in it that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import functools
import glob
import hashlib
import logging
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.direct import BLOCK, InputFile, address, allocate, new_scratch, set_direct, write_blocks
from megatron_fleet.storage.folder import PART, Parts, check_name

log = logging.getLogger(__name__)

OPEN_FILES = 100
"""Files kept open for ``read_into``, two descriptors each."""
UNFINISHED = ".partial"
"""Suffix of temporary files and folders; their names begin with a dot."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LocalFolder:
    """``Folder`` on a local or network file system. The folder is created on the first write."""

    def __init__(self, path: Path, cached: bool = False) -> None:
        """Open the folder at ``path``. ``cached``: see `open.open_folder`."""
        self.path = path
        self.url = str(path)
        self._files = functools.lru_cache(maxsize=OPEN_FILES)(functools.partial(InputFile, cached=cached))
        self._thread = threading.local()

    def join(self, name: str) -> str:
        return str(self._path(name))

    def sizes(self) -> dict[str, int]:
        return {name: status.st_size for name, status in self._listed()}

    def versions(self) -> dict[str, str]:
        return {name: str(status.st_mtime_ns) for name, status in self._listed()}

    def _listed(self) -> list[tuple[str, os.stat_result]]:
        found = {}
        with os_errors_as_user_error(self.path, "listed"):
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"{self.url} is a file; give the folder that it is in.")
            for folder, folders, names in os.walk(self.path, onerror=_raise):
                folders[:] = [f for f in folders if not is_unfinished(f)]
                for name in names:
                    path = Path(folder, name)
                    if is_unfinished(name):
                        continue
                    with suppress(FileNotFoundError):  # another process has removed it since
                        status = path.stat()
                        if stat.S_ISREG(status.st_mode):
                            found[path.relative_to(self.path).as_posix()] = status
        return sorted(found.items(), key=lambda item: item[0])

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self._path(name)
        with os_errors_as_user_error(path, "read"), open_regular(path) as f:
            f.seek(offset)
            data = f.read() if length is None else f.read(length)
            if length is not None and len(data) < length:
                raise _too_short(path, offset + length)
            return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        path = self._path(name)
        if not hasattr(self._thread, "scratch"):
            self._thread.scratch = new_scratch()
        with os_errors_as_user_error(path, "read"):
            view = buffer.cast("B")
            try:
                self._files(path).read_into(offset, view, self._thread.scratch)
            except EOFError:
                raise _too_short(path, offset + len(view)) from None

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with os_errors_as_user_error(path, "written", len(data)):
            make_folders(path.parent)
            write_atomically(path, data)
        self._files.cache_clear()

    def write_new(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with os_errors_as_user_error(path, "written", len(data)):
            make_folders(path.parent)
            temporary, fd = _open_temporary(path)
            try:
                with os.fdopen(fd, "wb") as f:
                    f.write(data)
                    f.flush()
                    os.fsync(fd)
                    os.link(temporary, path)  # unlike a rename, fails where there is a file
            except FileExistsError:
                return False
            finally:
                temporary.unlink()
            sync_folder(path.parent)
        self._files.cache_clear()
        return True

    def create(self, name: str, size: int) -> LocalWriter:
        path = self._path(name)
        with os_errors_as_user_error(path, "created", size):
            make_folders(path.parent)
            return LocalWriter(path, size, self._files.cache_clear)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with os_errors_as_user_error(path, "removed"):
            path.unlink(missing_ok=True)
        self._files.cache_clear()

    def clear(self, marker: str) -> None:
        with os_errors_as_user_error(self.path, "removed"):
            if self.path.exists():
                remove_folder(self.path)
        self._files.cache_clear()

    def _path(self, name: str) -> Path:
        return self.path / check_name(name)


class LocalWriter:
    """``FileWriter`` of a local file: writes a temporary file next to it, locked while in use and
    renamed at the end.
    """

    def __init__(self, path: Path, size: int, on_commit: Callable[[], None]) -> None:
        self.part = PART
        self._path = path
        self._size = size
        self._parts = Parts(str(path), size, PART)
        self._on_commit = on_commit
        remove_unfinished(path.parent, path.name)
        self._temporary, self._fd = _open_temporary(path)
        try:
            allocate(self._fd, -(-size // BLOCK) * BLOCK)
            self._direct = set_direct(self._fd, on=True)
        except BaseException:
            self.abort()
            raise

    def write_at(self, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        index = self._parts.index(offset, len(view))
        if address(view) % BLOCK:
            raise ValueError(f"{self._path}: the buffer is not page-aligned; make it with aligned_buffer")
        direct = self._direct
        with os_errors_as_user_error(self._path, "written", self._size):
            try:
                write_blocks(self._fd, offset, view, direct)
            except OSError as e:
                if e.errno != errno.EINVAL or not direct:
                    raise
                self._direct = not set_direct(self._fd, on=False)
                write_blocks(self._fd, offset, view, self._direct)
        self._parts.wrote(index)

    def commit(self) -> None:
        self._parts.require_all()
        with os_errors_as_user_error(self._path, "written", self._size):
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
            os.replace(self._temporary, self._path)
            sync_folder(self._path.parent)
        self._close()
        self._on_commit()

    def abort(self) -> None:
        if self._fd >= 0:
            self._temporary.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        UserError: it is not a regular file. A pipe would block, a device has no end.
        OSError: as of ``open``.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise UserError(f"{path} is not a regular file; check the address.")
    return os.fdopen(fd, "rb")


@contextmanager
def os_errors_as_user_error(path: Path, done: str, size: int | None = None) -> Iterator[None]:
    """Convert errors of the operating system to UserError.

    Args:
        done: participle of the failed operation on ``path`` ("read", "written"), for the message.
        size: bytes that it needed room for.
    """
    try:
        yield
    except FileNotFoundError:
        if size is None:
            raise UserError(f"{path}: there is no such file; check the address.") from None
        raise UserError(f"{path} was removed or renamed while being written; does another process use it?") from None
    except OSError as e:
        if e.errno in NO_ROOM and size is not None:
            raise UserError(f"{path}: {_no_room(path, size, e)}") from None
        raise UserError(f"{path} cannot be {done} ({e.strerror}); check the disk and its permissions.") from None


def write_atomically(path: Path, data: bytes, beside: Path | None = None) -> None:
    """Write a file into an existing folder, durably, through a temporary one next to it or next to ``beside``."""
    temporary, fd = _open_temporary(beside or path)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(fd)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def begin_folder(final: Path) -> Path:
    """Create an empty hidden folder next to ``final`` to write its files to, for `commit_folder`; what an earlier
    attempt left there is removed.
    """
    partial = final.with_name(f".{final.name}{UNFINISHED}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit_folder(partial: Path, final: Path) -> None:
    """Give a folder from `begin_folder` its name, durably, in place of an older one of that name.

    The caller has flushed the files in it.
    """
    for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir() and not path.is_symlink())):
        sync_folder(folder)
    old = _hide(final) if final.exists() else None
    os.rename(partial, final)
    sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder; it is hidden first, so that a half-removed one never looks whole.

    Of a symbolic link only the link is removed.
    """
    if path.is_symlink():
        log.warning("%s is a symbolic link: only the link is removed, %s stays", path, os.path.realpath(path))
        path.unlink()
    else:
        shutil.rmtree(_hide(path))


def rename_folder(path: Path, name: str) -> None:
    """Give a folder another name beside its present one, durably; one of that name is removed."""
    target = path.with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(path, target)
    sync_folder(path.parent)


def _hide(path: Path) -> Path:
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    return hidden


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


def sync_folder(path: Path) -> None:
    """Flush a folder's entries (names, renames) to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_unfinished(name: str) -> bool:
    """Whether a file or folder of this name is a temporary one."""
    return name.startswith(".") and name.endswith(UNFINISHED)


def remove_unfinished(folder: Path, name: str) -> None:
    """Remove the leftovers of killed writers of a file; a living writer holds a lock on its own."""
    for path in folder.glob(f".{glob.escape(name)}.*{UNFINISHED}"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def make_folders(path: Path) -> None:
    """Create a folder and its parents, durably."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def _open_temporary(path: Path) -> tuple[Path, int]:
    """Create a locked file next to ``path``; it is private to the user where their folder is."""
    mode = 0o666 if os.stat(path.parent).st_mode & 0o077 else 0o600
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = False
        except OSError as e:
            # A file system without locks cannot distinguish living writers either: nothing is removed there.
            taken = isinstance(e, BlockingIOError)
        if not taken and os.fstat(fd).st_nlink:
            return temporary, fd
        # Another process saw it unlocked, took it for a leftover, and has removed it or is about to.
        os.close(fd)


def _no_room(path: Path, size: int, error: OSError) -> str:
    if error.errno == errno.EFBIG:
        return f"{size} bytes are more than a file may have here (file system or ulimit -f); choose another place."
    if error.errno == errno.EDQUOT:
        return f"{size} bytes are more than the disk quota allows; free some space or choose another place."
    disk = os.statvfs(path.parent)
    free = disk.f_bavail * disk.f_frsize
    return f"{size} bytes are needed and the disk has {free} free; free some space or choose another place."


def _too_short(path: Path, end: int) -> UserError:
    return UserError(f"{path} has {path.stat().st_size} bytes and byte {end} was asked for; copy or download it again.")


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
