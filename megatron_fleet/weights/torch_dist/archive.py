"""Zip files of ``torch.save``: uncompressed records, one of which has its bytes elsewhere.

Format: APPNOTE.TXT of PKWARE (local headers, central directory, zip64) and ``caffe2/serialize/inline_container`` of
torch (record names, 64-byte alignment by an ``FB`` extra field, sizes in a descriptor after the data).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

ALIGNMENT = 64
"""Alignment of the data record in bytes, relative to the start of the archive."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_FOUR_GIB = 0xFFFFFFFF
_SIZES_FOLLOW = 1 << 3
_FOLDER = "archive/"


def pack(pickled: bytes, data_bytes: int | None) -> tuple[bytes, bytes]:
    """Build the bytes before and after the single storage of an archive.

    zip64 fields are used only if the storage has 4 GiB or more. Its stored checksum is 0: torch's reader is built
    without the check (``unzip -t`` complains).

    Args:
        pickled: ``data.pkl``, which names the storage ``0``.
        data_bytes: size of the storage; ``None`` for an archive without one.
    """
    before = b""
    directory = b""
    records: list[tuple[str, bytes, int]] = [
        (name, content, len(content))
        for name, content in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n"))
    ]
    if data_bytes is not None:
        records.append(("data/0", b"", data_bytes))
    for name, content, size in records:
        crc = zlib.crc32(content)
        raw_name = (_FOLDER + name).encode()
        wide = struct.pack("<2H2Q", 1, 16, size, size) if size >= _FOUR_GIB else b""
        version = 45 if wide else 10
        field = min(size, _FOUR_GIB)
        offset = len(before)
        padding = -(offset + _LOCAL.size + len(raw_name) + len(wide) + 4) % ALIGNMENT
        extra = wide + struct.pack("<2s H", b"FB", padding) + b"Z" * padding
        before += _LOCAL.pack(
            b"PK\x03\x04", version, 0, 0, 0, 0, crc, field, field, len(raw_name), len(extra)
        ) + raw_name + extra + content  # fmt: skip
        directory += _CENTRAL.pack(
            b"PK\x01\x02", version, version, 0, 0, 0, 0, crc, field, field, len(raw_name), len(wide), 0, 0, 0, 0, offset
        ) + raw_name + wide  # fmt: skip
    return before, directory + _end(len(records), len(directory), len(before) + (data_bytes or 0))


def _end(records: int, size: int, offset: int) -> bytes:
    """End of a central directory of ``size`` bytes at ``offset``."""
    last = _END.pack(b"PK\x05\x06", 0, 0, records, records, size, min(offset, _FOUR_GIB), 0)
    if offset < _FOUR_GIB:
        return last
    wide = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, records, records, size, offset)
    return wide + _LOCATOR64.pack(b"PK\x06\x07", 0, offset + size, 1) + last


def records(head: bytes) -> Iterator[tuple[str, int, int | None]]:
    """Records of an archive, in order: name without the archive's folder, start offset, end offset.

    Works on the first bytes of an archive; the last record, which extends beyond them, has no end.

    Raises:
        ValueError: not a zip file, compressed records, or a truncated header.
    """
    position = 0
    while head[position : position + 4] != b"PK\x01\x02":
        if len(head) - position < _LOCAL.size or not head.startswith(b"PK\x03\x04", position):
            raise ValueError("is not a file of torch.save, or lies elsewhere" if not position else "is cut off")
        _, _, flags, method, _, _, _, size, _, name_bytes, extra_bytes = _LOCAL.unpack_from(head, position)
        if method or flags & 1:
            raise ValueError("is compressed or encrypted; torch.save does neither")
        start = position + _LOCAL.size + name_bytes + extra_bytes
        name = head[position + _LOCAL.size : start - extra_bytes].decode("ascii", "replace").partition("/")[2]
        if flags & _SIZES_FOLLOW:
            end, position = _described_end(head, start)
        else:
            end = position = start + size
        if position > len(head):
            yield name, start, None
            return
        yield name, start, end


def _described_end(head: bytes, start: int) -> tuple[int, int]:
    """End of a record whose length is in the descriptor after it, and end of that descriptor.

    Beyond ``head`` if it is not there.
    """
    at = head.find(b"PK\x07\x08", start)
    while at >= 0:
        if head[at + 8 : at + 16] == struct.pack("<2I", at - start, at - start):
            return at, at + 16
        at = head.find(b"PK\x07\x08", at + 1)
    return len(head) + 1, len(head) + 1
