"""Interface of a folder of files, local or remote. Standard library only."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Protocol

from megatron_fleet.config.errors import UserError

PART = 16 << 20
"""Bytes written at once: enough for the full speed of a disk and of an S3 part, small enough to hold several in memory.
"""


Files = Mapping[str, Mapping[str, Any]]
"""Files below a folder, by relative name: ``{"bytes": int, "sha256": hex}``."""


class Readable(Protocol):
    """Files that can be read, in a folder or on a server. Every method may be called from several threads at once.

    Names are relative, with ``/`` between their parts. All methods raise UserError when the disk or the store refuses.
    A file must not be replaced while ``read_into`` reads it: two contents must never be read under one name.
    """

    url: str
    """Address, for messages."""

    def join(self, name: str) -> str:
        """Address of a file in the folder, for messages."""
        ...

    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of all files below the folder by name, sorted; empty when it does not exist. Omits unfinished
        files.
        """
        ...

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return exactly ``length`` bytes from ``offset``, or raise UserError; ``None`` = to the end of the file."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` (any writable contiguous one, any size, any offset) with the file's bytes from ``offset``.

        Fastest when the buffer's address and ``offset`` are equal modulo 4096.
        """
        ...


class Folder(Readable, Protocol):
    """Local folder or prefix of a bucket, as `Readable`."""

    def versions(self) -> dict[str, str]:
        """Versions of the files by name: strings that change when a file is replaced."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a small file durably and atomically: readers see the old one, or none, and then the whole new one."""
        ...

    def write_new(self, name: str, data: bytes) -> bool:
        """Write a small file as ``write`` does unless there is one; returns whether it was written. Of several writers
        at once, one succeeds.
        """
        ...

    def create(self, name: str, size: int) -> FileWriter:
        """Begin a file of ``size`` bytes. Raises UserError immediately when the disk has no room for it."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens when there is none."""
        ...

    def clear(self, marker: str) -> None:
        """Remove everything below the folder; ``marker``, which tells that it is whole, first."""
        ...


class FileWriter(Protocol):
    """File of known size being written; nothing appears under its name before ``commit``."""

    part: int
    """Bytes of every ``write_at`` except the one at the end of the file."""

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """Write one part: ``offset`` is a multiple of ``part``, ``buffer`` page-aligned (see ``aligned_buffer``).

        Thread-safe, in any order. The buffer may be reused afterwards. A part may be written again.

        Raises:
            ValueError: offset, length or alignment are not as above.
            UserError: the disk or the store refuses.
        """
        ...

    def commit(self) -> None:
        """Make the file durable, then visible. No ``write_at`` may be running.

        Raises:
            ValueError: a part was never written.
            UserError: the disk or the store refuses; the caller must still call ``abort``.
        """
        ...

    def abort(self) -> None:
        """Leave nothing behind, unless committed. Idempotent. No ``write_at`` may be running."""
        ...


def aligned_buffer(nbytes: int) -> memoryview:
    """Allocate ``nbytes`` zero bytes of page-aligned memory, as ``write_at`` requires; meant to be reused."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory)[:nbytes]


def check_name(name: str) -> str:
    """Return ``name`` if it is relative and stays inside a folder. Raises UserError otherwise."""
    path = PurePosixPath(name)
    outside = str(path) != name or path.is_absolute() or ".." in path.parts or name in ("", ".")
    if outside or not is_path(name):
        raise UserError(f"{name!r} is not the name of a file inside a folder; give a relative one like sub/file.")
    return name


def is_path(name: str) -> bool:
    """Whether a file can have this name or path: it has no NUL and can be encoded."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


class Parts:
    """Record of the parts of a file that have been written."""

    def __init__(self, url: str, size: int, part: int) -> None:
        if size < 0:
            raise ValueError(f"{url}: size is {size}")
        self._url = url
        self._size = size
        self._part = part
        self._written: set[int] = set()

    def index(self, offset: int, length: int) -> int:
        """Index of the part, from 0. Raises ValueError when the bytes are not exactly one part."""
        if offset % self._part or not 0 <= offset < self._size or length != min(self._part, self._size - offset):
            raise ValueError(
                f"{self._url}: {length} bytes at {offset} are not part of {self._size} bytes cut every {self._part}"
            )
        return offset // self._part

    def wrote(self, index: int) -> None:
        """Record a part as written, after its bytes have been."""
        self._written.add(index)

    def require_all(self) -> None:
        """Raise ValueError when a part was not written."""
        missing = sorted(set(range(-(-self._size // self._part))) - self._written)
        if missing:
            raise ValueError(
                f"{self._url}: {len(missing)} parts were not written, the first at {missing[0] * self._part}"
            )
