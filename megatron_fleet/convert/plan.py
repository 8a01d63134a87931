"""Plan of a conversion's output files, determined from headers only."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from megatron_fleet.storage.folder import Readable

CHECKPOINT = "manifest_sha256"
"""Entry of the journal of an export: SHA-256 of the manifest of the run's checkpoint from which it was made."""


class Content(Protocol):
    """Bytes that can be produced in any order, from several threads."""

    @property
    def nbytes(self) -> int: ...

    def fill(self, start: int, out: memoryview) -> None:
        """Write the bytes from ``start`` on into ``out``, filling it."""
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes that are already known."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def fill(self, start: int, out: memoryview) -> None:
        out[:] = self.data[start : start + len(out)]


@dataclass(slots=True)
class OutputFile:
    """One output file: concatenated contents.

    Attributes:
        offsets: offset of each content.
    """

    name: str
    contents: list[Content] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0

    def append(self, content: Content) -> int:
        """Append a content; return its offset."""
        offset = self.size
        if content.nbytes:
            self.contents.append(content)
            self.offsets.append(offset)
            self.size += content.nbytes
        return offset

    def fill(self, start: int, out: memoryview) -> None:
        """Produce the bytes of the file from ``start`` on, filling ``out``."""
        end = start + len(out)
        k = max(bisect.bisect_right(self.offsets, start) - 1, 0)
        while k < len(self.contents) and self.offsets[k] < end:
            first = max(start, self.offsets[k])
            last = min(end, self.offsets[k] + self.contents[k].nbytes)
            self.contents[k].fill(first - self.offsets[k], out[first - start : last - start])
            k += 1


@dataclass(frozen=True, slots=True)
class Checksum:
    """Size and SHA-256 of a source file according to its writer's manifest."""

    folder: Readable
    name: str
    nbytes: int
    sha256: str


@dataclass(slots=True)
class Plan:
    """A planned conversion.

    Attributes:
        files: large files, streamed.
        small: small files (name → bytes), written afterwards, in order.
        marker, marker_data: file that is written last and marks the output as complete.
        identity: everything that determines the files' bytes; a resumed run must have the same.
        source: used in messages.
        checksums: verified against the source's files before anything is written.
    """

    files: list[OutputFile]
    small: dict[str, bytes]
    marker: str
    marker_data: bytes
    identity: dict[str, str]
    source: str
    checksums: tuple[Checksum, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """Hash of everything that determines the output."""
        digest = hashlib.sha256(repr(sorted(self.identity.items())).encode())
        for file in self.files:
            digest.update(f"{file.name} {file.size} {len(file.contents)}\n".encode())
        for name, data in (*self.small.items(), (self.marker, self.marker_data)):
            digest.update(f"{name} {len(data)}\n".encode() + data)
        return digest.hexdigest()


def windows(size: int, part: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of the parts of a file."""
    for offset in range(0, size, part):
        yield offset, min(part, size - offset)
