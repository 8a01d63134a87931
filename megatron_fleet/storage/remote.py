"""Requests to object stores: what the folders on S3 and in GCS share. Standard library only.

Why the clients of the two stores make the requests, and not one library for both: ``docs/run/checkpoints.md``.
"""

from __future__ import annotations

import logging
import random
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar

from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.folder import FileWriter, Folder, Parts, check_name

BODY_ATTEMPTS = 6
"""Attempts at one request with a body, and at one read whose connection breaks in the middle; bytes already received
are kept."""
PIECE = 1 << 20
"""Bytes received per read from a connection."""
NO_BUCKET = "the bucket does not exist; create it or correct the address."
NO_FILE = "there is no such file; check the address."
UPLOAD_REMOVED = "the unfinished upload was removed, by another process or the store's own rules; write the file again."

Answer = tuple[AbstractContextManager[Any], int, str | None]
"""The body, a context that has ``readinto``; the number of its bytes; the file's version."""
T = TypeVar("T")
log = logging.getLogger(__name__)


def pause(attempt: int) -> None:
    """Wait before an attempt, 0 = the first: at random and longer each time, so that clients do not come together."""
    if attempt:
        time.sleep(random.uniform(0, 0.1 * 2**attempt))


def retried(request: Callable[[], T], transient: Callable[[Exception], bool], attempts: int = BODY_ATTEMPTS) -> T:
    """Send a request until it succeeds, at most ``attempts`` times; errors that are not ``transient`` end it."""
    for attempt in range(1, attempts):
        try:
            return request()
        except Exception as e:
            if not transient(e):
                raise
            pause(attempt)
    return request()


def denied(code: str) -> str:
    """Meaning of a refusal for want of a permission."""
    return f"the store denies the access ({code}); give this identity the permission or use another one."


class Exists(UserError):
    """A file that must be new is there."""


class RemoteFolder(Folder):
    """``Folder`` in an object store, without its requests. A read whose connection broke resumes at that byte."""

    broken: ClassVar[tuple[type[Exception], ...]]
    """Errors of a body whose connection broke."""

    def __init__(self, scheme: str, bucket: str, prefix: str) -> None:
        """Args: ``prefix``: without slashes around it; empty = the whole bucket."""
        self.url = f"{scheme}://{bucket}/{prefix}"
        self._prefix = f"{prefix}/" if prefix else ""
        self._root = f"{scheme}://{bucket}/{self._prefix}"

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file, ``None`` when there is none."""

    @abstractmethod
    def abort_uploads(self) -> None:
        """Remove every unfinished file below the folder: those of killed writers, but also of living ones."""

    @abstractmethod
    def _files(self) -> Iterable[tuple[str, int, str]]:
        """Name, size and version of each file, in any order."""

    @abstractmethod
    def _get(self, name: str, offset: int, length: int, version: str | None) -> Answer:
        """Ask for bytes of a file, which must be of this version if one is given.

        Raises UserError: it is of another one; ``_too_short``.
        """

    @abstractmethod
    def _put(self, name: str, data: bytes, only_new: bool) -> None:
        """Write a file in one request. Raises Exists when there is one and ``only_new``."""

    def join(self, name: str) -> str:
        return self._root + check_name(name)

    def sizes(self) -> dict[str, int]:
        return {name: size for name, size, _ in sorted(self._files())}

    def versions(self) -> dict[str, str]:
        return {name: version for name, _, version in sorted(self._files())}

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if length is None:
            size = self.size(name)
            if size is None:
                raise UserError(f"{self.join(name)}: {NO_FILE}")
            length = max(size - offset, 0)
        data = bytearray(length)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        done, version = 0, None
        error: Exception | None = None
        for attempt in range(BODY_ATTEMPTS if len(view) else 0):
            pause(attempt)
            body, length, version = self._get(name, offset + done, len(view) - done, version)
            try:
                with body as stream:
                    if length != len(view) - done:
                        raise self._too_short(name, offset + len(view))
                    while done < len(view):
                        count = stream.readinto(view[done : done + PIECE])
                        if not count:
                            raise OSError("the answer is too short")
                        done += count
                return
            except self.broken as e:
                error = e
        if error:
            raise UserError(
                f"{self.join(name)}: the connection broke {BODY_ATTEMPTS} times ({error}); check the network."
            )

    def write(self, name: str, data: bytes) -> None:
        self._put(name, data, only_new=False)

    def write_new(self, name: str, data: bytes) -> bool:
        try:
            self._put(name, data, only_new=True)
        except Exists:
            # A request that was answered too late is sent twice: the second finds what the first has written.
            return self.read(name) == data
        return True

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _too_short(self, name: str, end: int) -> UserError:
        return UserError(
            f"{self.join(name)} has {self.size(name)} bytes and byte {end} was asked for; upload it again."
        )


class RemoteWriter(FileWriter):
    """``FileWriter`` of an object, without its requests."""

    def __init__(self, folder: RemoteFolder, name: str, size: int, part: int) -> None:
        self.part = part
        self._folder = folder
        self._name = check_name(name)
        self._url = folder.join(name)
        self._size = size
        self._parts = Parts(self._url, size, part)
        self._open = True
        """Whether the store may hold parts."""

    @abstractmethod
    def _send(self, index: int, data: bytes) -> None:
        """Send a part."""

    @abstractmethod
    def _join(self) -> None:
        """Make the file, which is not empty, of its parts."""

    @abstractmethod
    def _remove_parts(self) -> None:
        """Remove the parts from the store."""

    def write_at(self, offset: int, buffer: memoryview) -> None:
        view = buffer.cast("B")
        index = self._parts.index(offset, len(view))
        self._send(index, bytes(view))
        self._parts.wrote(index)

    def commit(self) -> None:
        self._parts.require_all()
        if self._size:
            self._join()
        else:
            # Parts cannot be joined when there is none, and some stores reject an empty one.
            self._folder.write(self._name, b"")
        stored = self._folder.size(self._name)
        if stored != self._size:
            self._folder.delete(self._name)
            self.abort()
            raise UserError(f"{self._url}: the store holds {stored} bytes of {self._size}; write the file again.")
        try:
            self.abort()
        except UserError as e:
            # The file is whole; its parts are removed with those of killed writers when the folder is committed.
            self._open = False
            log.warning("parts of a finished file stay in the store: %s", e)

    def abort(self) -> None:
        if self._open:
            self._remove_parts()
            self._open = False
