"""Bytes per second of ``megatron_fleet.storage`` against ``dd`` and ``cp`` on the same disk. Prints one line of JSON.

Copies to an S3 server are measured by ``checkpoint.py``.

    python benchmarks/storage.py FOLDER [--gb 2] [--rounds 3]         # FOLDER on the disk to measure
    python benchmarks/storage.py s3://bucket/prefix [--gb 1]          # no reference then

In GB/s (10^9 bytes), the median of the rounds; ours and the references take turns, so that a busy machine disturbs both
alike. Writes are durable when the clock stops, reads come from the disk and not from the page cache.

* ``write``: parts of ``part`` bytes from 1, 2 and 4 threads; ``dd`` writes blocks of the same size with O_DIRECT.
* ``read_parts``: the same parts; ``dd`` reads them with O_DIRECT.
* ``read_tensors``: 3 MB in random order at offsets that are aligned to nothing, as tensors of experts lie.
* ``read_rows``: microseconds of one read of 8 kB in random order.
* ``cp``: copying the file and flushing the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from measured import stamp

from megatron_fleet.storage.folder import Folder, aligned_buffer
from megatron_fleet.storage.open import open_folder

THREADS = (1, 2, 4)
TENSOR = 3_000_001
ROW = 8_000
ROWS = 2_000


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def spread(threads: int, largest: int, work: Callable[[int, memoryview], None], offsets: Iterable[int]) -> None:
    """``work(offset, buffer)`` for all offsets, each thread with one buffer of its own."""
    own = threading.local()

    def one(offset: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = aligned_buffer(largest)
        work(offset, own.buffer)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, offsets))


def write(folder: Folder, size: int, threads: int) -> None:
    folder.delete("ours")
    writer = folder.create("ours", size)
    offsets = range(0, size, writer.part)
    spread(threads, writer.part, lambda at, buffer: writer.write_at(at, buffer[: min(writer.part, size - at)]), offsets)
    writer.commit()


def read(folder: Folder, size: int, threads: int, length: int, count: int, shuffled: bool) -> float:
    """Bytes per second of ``count`` reads."""
    offsets = list(range(0, size - length, max(length, (size - length) // count)))
    if shuffled:
        random.Random(0).shuffle(offsets)
    return (
        length
        * len(offsets)
        / seconds(lambda: spread(threads, length, lambda at, buffer: folder.read_into("ours", at, buffer), offsets))
    )


def drop(file: Path) -> None:
    """Remove a file from the page cache."""
    with file.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def shell(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def references(path: Path, size: int, part: int) -> dict[str, float]:
    """GB/s of the system's own tools."""
    ours, theirs = str(path / "ours"), str(path / "theirs")
    blocks = [f"bs={part}", f"count={size // part}"]
    found = {
        "dd write": seconds(lambda: shell("dd", "if=/dev/zero", f"of={theirs}", "oflag=direct", "conv=fsync", *blocks))
    }
    drop(path / "ours")
    found["dd read"] = seconds(lambda: shell("dd", f"if={ours}", "of=/dev/null", "iflag=direct", *blocks))
    Path(theirs).unlink()
    found["cp"] = seconds(lambda: shell("sh", "-c", 'cp "$0" "$1" && sync "$1"', ours, theirs))
    Path(theirs).unlink()
    return {name: size / each / 1e9 for name, each in found.items()}


def measure(url: str, size: int, rounds: int) -> dict[str, float]:
    """Every figure by name, the median of the rounds."""
    found: dict[str, list[float]] = defaultdict(list)
    folder = open_folder(url)
    path = None if "://" in url else Path(url)
    part = 16 << 20
    for _ in range(rounds):
        for threads in THREADS:
            found[f"write {threads}"].append(size / seconds(partial(write, folder, size, threads)) / 1e9)
        for threads in THREADS:
            for name, length, count in (("parts", part, size // part), ("tensors", TENSOR, 10**6), ("rows", ROW, ROWS)):
                if path:
                    drop(path / "ours")
                speed = read(folder, size, threads, length, count, name != "parts")
                found[f"read_{name} {threads}"].append(ROW / speed * 1e6 if name == "rows" else speed / 1e9)
        for name, speed in (references(path, size, part) if path else {}).items():
            found[name].append(speed)
    folder.delete("ours")
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a folder on the disk, or S3 prefix, to measure")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the file")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    size = int(arguments.gb * 1e9) // (16 << 20) * (16 << 20)
    figures = measure(arguments.url, size, arguments.rounds)
    print(json.dumps({"figures": figures, "bytes": size, **stamp(__file__)}))


if __name__ == "__main__":
    main()
