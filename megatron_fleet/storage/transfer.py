"""Copies of files from one folder to another, several parts at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field

from megatron_fleet.storage.folder import FileWriter, Folder, aligned_buffer

WORKERS = 16
"""Parts under way at a time, each with a buffer of one part."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One file to copy. ``source`` and ``target`` are its names in the two folders."""

    source: str
    target: str
    size: int


class Throttle:
    """Limit on the bytes per second of all copies that share it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, nbytes: int, stop: threading.Event) -> None:
        """Wait until ``nbytes`` may be sent, or ``stop`` is set."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._bytes_per_s
        stop.wait(begin - now)


def transfer(
    source: Folder,
    target: Folder,
    copies: Iterable[Copy],
    throttle: Throttle | None = None,
    stop: threading.Event | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Copy files. Each appears whole or not at all; those that are finished stay when a later one fails.

    Args:
        stop: ends the work early when another thread sets it.
        advance: called with the number of bytes of each finished part, from several threads.

    Raises:
        UserError: a folder refuses, or a file is shorter than its size says.
        CancelledError: ``stop`` was set.
    """
    _Transfer(source, target, throttle, stop or threading.Event(), advance).run(copies)


@dataclass
class _File:
    copy: Copy
    writer: FileWriter
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    committed: bool = False


class _Transfer:
    def __init__(
        self,
        source: Folder,
        target: Folder,
        throttle: Throttle | None,
        stop: threading.Event,
        advance: Callable[[int], None],
    ) -> None:
        self._source, self._target, self._throttle = source, target, throttle
        self._stop, self._advance = stop, advance
        self._failed = threading.Event()
        self._error: BaseException | None = None
        self._room = threading.BoundedSemaphore(WORKERS)
        self._buffers = threading.local()

    def run(self, copies: Iterable[Copy]) -> None:
        files: list[_File] = []
        try:
            with ThreadPoolExecutor(WORKERS, thread_name_prefix="transfer") as pool:
                for copy in copies:
                    writer = self._target.create(copy.target, copy.size)
                    offsets = range(0, copy.size, writer.part)
                    files.append(_File(copy, writer, len(offsets)))
                    if not offsets:
                        self._commit(files[-1])
                    for offset in offsets:
                        self._room.acquire()
                        if self._ended():
                            break
                        pool.submit(self._part, files[-1], offset)
                    if self._ended():
                        break
                    files = [file for file in files if not file.committed]
        finally:
            for file in files:
                if not file.committed:
                    file.writer.abort()
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise CancelledError

    def _ended(self) -> bool:
        return self._failed.is_set() or self._stop.is_set()

    def _part(self, file: _File, offset: int) -> None:
        try:
            if self._ended():
                return
            count = min(file.writer.part, file.copy.size - offset)
            if self._throttle is not None:
                self._throttle.wait(count, self._stop)
            buffer = self._buffer(count)
            self._source.read_into(file.copy.source, offset, buffer)
            if self._ended():
                return
            file.writer.write_at(offset, buffer)
            self._advance(count)
            with file.lock:
                file.left -= 1
                last = file.left == 0
            if last:
                self._commit(file)
        except BaseException as error:
            self._error = self._error or error
            self._failed.set()
        finally:
            self._room.release()

    def _commit(self, file: _File) -> None:
        file.writer.commit()
        file.committed = True

    def _buffer(self, count: int) -> memoryview:
        held: memoryview | None = getattr(self._buffers, "held", None)
        if held is None or len(held) < count:
            held = self._buffers.held = aligned_buffer(count)
        return held[:count]
