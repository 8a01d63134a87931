"""What the output files of a conversion consist of. Known before anything is read but headers."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from megatron_fleet.storage.folder import Folder

JOURNAL = "conversion.json"
"""What a conversion is, beside its files: written first, so that only the same one is taken up again."""


class Content(Protocol):
    """Bytes that can be made, any of them at any time; from several threads."""

    @property
    def nbytes(self) -> int: ...

    def fill(self, start: int, out: memoryview) -> None:
        """Write the bytes from ``start`` on into ``out``, as many as it has room for."""
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes known now."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def fill(self, start: int, out: memoryview) -> None:
        out[:] = self.data[start : start + len(out)]


@dataclass(slots=True)
class OutputFile:
    """One file: contents one after another.

    Attributes:
        offsets: where each content begins.
    """

    name: str
    contents: list[Content] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0

    def append(self, content: Content) -> int:
        """Add at the end; returns the offset."""
        offset = self.size
        if content.nbytes:
            self.contents.append(content)
            self.offsets.append(offset)
            self.size += content.nbytes
        return offset

    def fill(self, start: int, out: memoryview) -> None:
        """Make the bytes of the file from ``start`` on, as many as ``out`` has room for."""
        end = start + len(out)
        k = max(bisect.bisect_right(self.offsets, start) - 1, 0)
        while k < len(self.contents) and self.offsets[k] < end:
            first = max(start, self.offsets[k])
            last = min(end, self.offsets[k] + self.contents[k].nbytes)
            self.contents[k].fill(first - self.offsets[k], out[first - start : last - start])
            k += 1


@dataclass(frozen=True, slots=True)
class Checksum:
    """A file of the source and what its writer's manifest says of it."""

    folder: Folder
    name: str
    nbytes: int
    sha256: str


@dataclass(slots=True)
class Plan:
    """A conversion.

    Attributes:
        files: the big ones, streamed.
        small: written after them, in order; name → bytes.
        marker, marker_data: the file that is written last and by which the output counts as whole.
        identity: what decides the bytes of the files; a resumed run must have the same.
        source: for messages.
        checksums: compared with the source's files before anything is written.
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
        """Of everything that decides the output."""
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
