"""Helpers for the tests of both kinds of folder."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_fleet.storage.folder import FileWriter, aligned_buffer
from megatron_fleet.storage.local import LocalFolder

BYTES = random.Random(0).randbytes(400_003)


def fill(writer: FileWriter, data: bytes, threads: int = 1) -> None:
    """Write all parts of ``data`` in random order, and spoil each buffer afterwards."""

    def put(offset: int) -> None:
        part = data[offset : offset + writer.part]
        buffer = aligned_buffer(len(part))
        buffer[:] = part
        writer.write_at(offset, buffer)
        buffer[:] = bytes(len(part))

    offsets = list(range(0, len(data), writer.part))
    random.Random(1).shuffle(offsets)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, offsets))


def names_in(folder: LocalFolder) -> list[str]:
    """Files that really lie in a local folder, unfinished files too."""
    return sorted(os.listdir(folder.path))


def has_direct(path: Path) -> bool:
    """Whether the file system of a file makes direct transfers."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def python(program: str, *arguments: object, stdin: int | None = None) -> subprocess.Popen[str]:
    """Run a program with this interpreter."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
