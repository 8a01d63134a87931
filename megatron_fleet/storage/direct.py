"""Reads and writes of a local file past the page cache, where the file system can (Linux O_DIRECT, open(2)).

Direct transfers need an aligned file offset, length and memory address. On file systems that refuse them (tmpfs, some
network ones) everything here goes through the page cache and returns the same bytes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from pathlib import Path

from megatron_fleet.storage.folder import aligned_buffer

BLOCK = 4096
"""Alignment of direct transfers, enough for every usual disk; where it is not, the kernel returns EINVAL."""
DIRECT_BYTES = 128 << 10
"""Size below which reads go through the page cache, so that a block requested piecewise is read once."""
SCRATCH = 4 << 20
"""Bytes of one read that has to be copied because source and destination are not mutually aligned."""

PLACED = 64 << 20
"""Bytes of one read straight into its destination; the kernel's limit is 2 GiB."""


def address(view: memoryview) -> int:
    """Memory address of a writable, non-empty view. Raises ValueError when it is read-only."""
    if view.readonly:
        raise ValueError("the buffer is read-only; make it with aligned_buffer")
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def set_direct(fd: int, on: bool) -> bool:
    """Switch direct transfers for a descriptor; return whether they are now as requested."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return False
    return True


def new_scratch() -> memoryview:
    """Allocate scratch memory for ``InputFile.read_into``; for one thread."""
    return aligned_buffer(SCRATCH + 2 * BLOCK)


class InputFile:
    """Open file; closed when nothing refers to it any more, so that no thread's read loses its descriptor."""

    def __init__(self, path: Path, cached: bool = False) -> None:
        """Open a file. ``cached``: read through the page cache, for files that other processes of this machine read
        too.
        """
        self._fds: list[int] = []
        for _ in range(2):
            self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._cached, self._uncached = self._fds
        # Weights are read in the order of the model, not of the file: reading ahead would be wasted.
        os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_RANDOM)
        self._direct = not cached and set_direct(self._uncached, on=True)

    def __del__(self) -> None:
        for fd in self._fds:
            os.close(fd)

    def read_into(self, offset: int, view: memoryview, scratch: memoryview) -> None:
        """Fill ``view`` (bytes). Raises EOFError when the file is too short."""
        if not self._direct or len(view) < DIRECT_BYTES:
            self._read_cached(offset, view)
            return
        in_place = (address(view) - offset) % BLOCK == 0
        step = PLACED if in_place else SCRATCH
        for at in range(0, len(view), step):
            piece = view[at : at + step]
            read = self._read_in_place if in_place else self._read_through
            # Short reads occur at the end of the file or for the kernel's own reasons: the cached path handles both.
            if len(piece) < 2 * BLOCK or not read(offset + at, piece, scratch):
                self._read_cached(offset + at, piece)

    def _read_in_place(self, offset: int, view: memoryview, scratch: memoryview) -> bool:
        """Read whole blocks straight into ``view``, and the partial ones at its two ends through ``scratch``."""
        before = offset % BLOCK
        head = -offset % BLOCK
        tail = (offset + len(view)) % BLOCK
        first, last = scratch[:BLOCK], scratch[BLOCK : 2 * BLOCK]
        vectors = [first] * (head > 0) + [view[head : len(view) - tail]] + [last] * (tail > 0)
        if not self._read_blocks(vectors, offset - before, before + len(view)):
            return False
        if head:
            view[:head] = first[before:]
        if tail:
            view[len(view) - tail :] = last[:tail]
        return True

    def _read_through(self, offset: int, view: memoryview, scratch: memoryview) -> bool:
        """Read all blocks into ``scratch``, then copy the wanted bytes into ``view``."""
        before = offset % BLOCK
        needed = before + len(view)
        if not self._read_blocks([scratch[: -(-needed // BLOCK) * BLOCK]], offset - before, needed):
            return False
        view[:] = scratch[before:needed]
        return True

    def _read_blocks(self, vectors: list[memoryview], offset: int, needed: int) -> bool:
        """Read blocks and return whether at least ``needed`` bytes arrived."""
        try:
            return os.preadv(self._uncached, vectors, offset) >= needed
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            self._direct = False
            return False

    def _read_cached(self, offset: int, view: memoryview) -> None:
        at = 0
        while at < len(view):
            count = os.preadv(self._cached, [view[at:]], offset + at)
            if not count:
                raise EOFError(offset + at)
            at += count


def allocate(fd: int, size: int) -> None:
    """Reserve ``size`` bytes and make the file that long, so that parallel writes need not extend it.

    Calls fallocate(2) itself: the C library's posix_fallocate would write to every block where the file system lacks
    it.

    Raises:
        OSError: ENOSPC, EDQUOT, EFBIG… as of fallocate(2); ENOSPC too when the file system cannot reserve and has less.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not size or libc.fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        disk = os.fstatvfs(fd)
        # A file system that does not know its size reports 0.
        if not disk.f_blocks or size <= disk.f_bavail * disk.f_frsize:
            os.ftruncate(fd, size)
            return
        code = errno.ENOSPC
    raise OSError(code, os.strerror(code))


def write_blocks(fd: int, offset: int, view: memoryview, direct: bool) -> None:
    """Write all of ``view`` at a block boundary; a partial last block is padded with zeros.

    Without ``direct`` the bytes are on the disk and out of the page cache when this returns: otherwise the cache would
    fill with data that nobody reads again, evict what others need, and be written all at once at the end.
    """
    whole = len(view) // BLOCK * BLOCK
    _write_all(fd, offset, view[:whole])
    if whole < len(view):
        last = aligned_buffer(BLOCK)
        last[: len(view) - whole] = view[whole:]
        _write_all(fd, offset + whole, last)
    if not direct:
        os.fdatasync(fd)
        os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, offset: int, view: memoryview) -> None:
    at = 0
    while at < len(view):
        at += os.pwrite(fd, view[at:], offset + at)
