"""Pack a wheel anew with less in it, for a machine that is reached with files of limited size.

`repack` leaves files out, reduces CUDA libraries to the device code of one GPU architecture, and compresses with LZMA.

nvcc puts the device code of a library into its ELF section ``.nv_fatbin`` (relocatable code into ``__nv_relfatbin``):
one fat binary for each compiled source file, begun at a multiple of eight bytes. A fat binary is a header and entries
with code for one architecture each, all numbers little-endian:

    header    u32 magic 0xBA55ED50, u16 version, u16 size of this header (16), u64 bytes that follow
    entry      +0 u16 kind: 1 for PTX, 2 for a cubin, which is machine code
               +2 u16 version
               +4 u32 size of the entry's header: 64, or more with a name and options
               +8 u64 size of the payload, with its padding
              +28 u32 architecture: 90 for sm_90 and for sm_90a
              ... sizes and flags of a compressed payload; then the payload

The driver chooses an entry by the headers and reads no other payload. So the payloads that one GPU never uses are
overwritten with zeros, which compress to nothing, and every offset in the file stays as it was. The symbol table, which
the loader does not read, is overwritten too.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

FAT_BINARY = 0xBA55ED50
PTX, CUBIN = 1, 2
ENTRY_HEADER = 64
"""Bytes of the shortest header of an entry."""
DEVICE_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
SYMBOL_SECTIONS = (".symtab", ".strtab")
NO_BITS = 8
"""Type of an ELF section without bytes in the file."""
LIBRARY = re.compile(r"\.so(\.\d+)*$")


@dataclass(frozen=True, slots=True)
class Section:
    """Part of an ELF file; ``offset`` and ``size`` in bytes."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """Device code for one architecture; ``offset`` and ``size`` of its payload in the file, in bytes."""

    kind: int
    arch: int
    offset: int
    size: int


@dataclass(slots=True)
class Reduction:
    """Account of what was left out.

    Attributes:
        before, after: bytes of device code.
        usable: fat binaries with code for the GPU.
        files: those left out.
    """

    before: int = 0
    after: int = 0
    usable: int = 0
    files: int = 0


def sections(library: bytes | bytearray) -> list[Section]:
    """Return the sections of a 64-bit little-endian ELF file that have bytes in it. Raises ValueError for others."""
    if bytes(library[:6]) != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, number, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + size * index) for index in range(number)]
    found = []
    for name, kind, _, _, offset, length in headers:
        start = headers[names][4] + name
        text = bytes(library[start : library.index(0, start)]).decode()
        if kind != NO_BITS:
            found.append(Section(text, offset, length))
    return found


def fat_binaries(library: bytes | bytearray, section: Section) -> Iterator[list[Entry]]:
    """Yield the entries of each fat binary of a section. Raises ValueError where it holds anything else."""
    at, end = section.offset, section.offset + section.size
    while at + 16 <= end:
        magic, _, header, following = struct.unpack_from("<IHHQ", library, at)
        if not magic:
            at += 8  # padding
            continue
        entries, stop = [], at + header + following
        at += header
        while magic == FAT_BINARY and at + ENTRY_HEADER <= stop <= end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
            (arch,) = struct.unpack_from("<I", library, at + 28)
            if header < ENTRY_HEADER:
                break
            entries.append(Entry(kind, arch, at + header, size))
            at += header + size
        if at != stop:
            raise ValueError(f"no fat binary of a known layout before byte {at - section.offset} of {section.name}")
        yield entries


def usable(entries: Sequence[Entry], arch: int) -> list[Entry]:
    """Return what a GPU of ``arch`` (90 for sm_90) uses: its machine code, else the newest PTX that it can compile."""
    code = [entry for entry in entries if entry.kind == CUBIN and entry.arch == arch]
    texts = [entry for entry in entries if entry.kind == PTX and entry.arch <= arch]
    newest = max((entry.arch for entry in texts), default=0)
    return code or [entry for entry in texts if entry.arch == newest]


def reduce_library(library: bytearray, arch: int) -> Reduction:
    """Overwrite with zeros, in place, what a GPU of ``arch`` does not use. Raises ValueError for an unknown layout."""
    done = Reduction()
    for section in sections(library):
        if section.name in SYMBOL_SECTIONS:
            _overwrite(library, section)
        elif section.name in DEVICE_SECTIONS:
            for entries in fat_binaries(library, section):
                kept = usable(entries, arch)
                done.usable += bool(kept)
                done.before += sum(entry.size for entry in entries)
                done.after += sum(entry.size for entry in kept)
                for entry in entries:
                    if entry not in kept:
                        _overwrite(library, entry)
    return done


def _overwrite(library: bytearray, part: Section | Entry) -> None:
    library[part.offset : part.offset + part.size] = bytes(part.size)


def has_library(wheel: Path) -> bool:
    """Return whether a wheel has a shared library in it."""
    with zipfile.ZipFile(wheel) as archive:
        return any(LIBRARY.search(name) for name in archive.namelist())


def repack(published: Path, wheel: Path, left_out: Sequence[str], arch: int) -> Reduction:
    """Write ``wheel`` without the files that match the patterns ``left_out``, its libraries reduced to ``arch``.

    Raises:
        ValueError: a library has another layout, or device code but none for ``arch`` in the whole wheel.
    """
    done, rows = Reduction(), []
    with zipfile.ZipFile(published) as old, zipfile.ZipFile(wheel, "w") as new:
        (record,) = (info for info in old.infolist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", info.filename))
        for info in old.infolist():
            if info.is_dir() or info is record:
                continue
            if any(fnmatch(info.filename, pattern) for pattern in left_out):
                done.files += 1
                continue
            content = bytearray(old.read(info))
            if LIBRARY.search(info.filename):
                _count(done, info.filename, content, arch)
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            rows.append((info.filename, f"sha256={hashed}", len(content)))
            _write(new, info, content)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record.filename, "", "")])
        _write(new, record, text.getvalue().encode())
    if done.before and not done.usable:
        raise ValueError(f"no library has device code for sm_{arch}")
    return done


def _count(done: Reduction, name: str, library: bytearray, arch: int) -> None:
    try:
        one = reduce_library(library, arch)
    except (ValueError, struct.error) as error:
        raise ValueError(f"{name}: {error}") from error
    done.before, done.after, done.usable = done.before + one.before, done.after + one.after, done.usable + one.usable


def _write(archive: zipfile.ZipFile, like: zipfile.ZipInfo, content: bytes | bytearray) -> None:
    """Add a file with the name, the date and the permissions of another archive's.

    LZMA makes device code that nvcc has not compressed four times smaller than deflate does.
    """
    info = zipfile.ZipInfo(like.filename, like.date_time)
    info.external_attr, info.compress_type = like.external_attr, zipfile.ZIP_LZMA
    archive.writestr(info, content)
