"""Execution of a conversion plan: multithreaded, bounded memory, resumable, completed atomically."""

from __future__ import annotations

import hashlib
import json
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from megatron_fleet.config.errors import UserError
from megatron_fleet.convert.plan import Checksum, OutputFile, Plan, windows
from megatron_fleet.storage.folder import PART, FileWriter, Folder, aligned_buffer
from megatron_fleet.storage.open import open_folder, open_staging
from megatron_fleet.storage.staging import Staging
from megatron_fleet.weights.hf_folder import JOURNAL

ATTEMPTS = 5
"""Attempts to complete a folder that other processes are completing too."""


class ByteProgress(Protocol):
    """Receives the current activity and its progress in bytes."""

    def start(self, what: str, total: int, done: int = 0) -> None: ...

    def advance(self, nbytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Share:
    """Part ``index`` of ``count`` of a conversion's files; several machines can each do one."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Share:
        """Parse a share: ``2/8`` is the second of eight. Raises UserError."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        index, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= index <= count:
            raise UserError(f"--shard {text}: give I/N with 1 ≤ I ≤ N, for example 1/8.")
        return cls(index - 1, count)


def execute(plan: Plan, out: str, workers: int, share: Share, progress: ByteProgress) -> bool:
    """Write a plan's files to a folder that appears completely or not at all.

    Files finished by an earlier run of the same plan are not written again. The run that finds all files finished
    completes the folder, so runs on several machines need no coordination; several may even do the same share.

    Args:
        out: local path, ``s3://`` or ``gs://`` address; must not exist.
        workers: number of threads; each needs about 30 MB, more if rows are very wide.

    Returns:
        Whether the output is complete; ``False`` if other shares are still pending.

    Raises:
        UserError: ``out`` exists, another conversion into it is unfinished, the source does not match its manifest, or
            a disk or object store fails.
    """
    staging = open_staging(out, plan.marker)
    if is_complete(staging, plan):
        return True
    for attempt in range(ATTEMPTS):
        try:
            return _execute(staging, plan, workers, share, progress)
        except UserError:
            # Another process that completes the folder moves it away from under this one.
            finishing = False
            with suppress(UserError):
                finishing = _all_finished(staging, plan) and attempt + 1 < ATTEMPTS
            if is_complete(staging, plan):
                break
            if not finishing:
                raise
            time.sleep(0.1 * attempt)
    staging.commit(plan.marker_data)
    return True


def _all_finished(staging: Staging, plan: Plan) -> bool:
    finished = staging.folder.sizes()
    return all(finished.get(file.name) == file.size for file in plan.files)


def _execute(staging: Staging, plan: Plan, workers: int, share: Share, progress: ByteProgress) -> bool:
    claim(staging, plan)
    check_sources(plan.checksums[share.index :: share.count], workers, progress)
    finished = staging.folder.sizes()
    mine = plan.files[share.index :: share.count]
    done = sum(file.size for file in mine if finished.get(file.name) == file.size)
    progress.start(staging.url, sum(file.size for file in mine), done)
    for file in mine:
        if staging.exists():
            break
        if finished.get(file.name) != file.size:
            write_file(staging.folder, file, workers, progress)
    if not _all_finished(staging, plan) and not staging.exists():
        return False
    if not staging.exists():
        claim(staging, plan)
        for name, data in plan.small.items():
            staging.folder.write(name, data)
    staging.commit(plan.marker_data)
    return True


def is_complete(staging: Staging, plan: Plan) -> bool:
    """Whether this conversion is already finished. Raises UserError if its place is taken by something else."""
    if not staging.exists():
        return False
    with suppress(UserError, ValueError, KeyError, TypeError, RecursionError):
        if json.loads(open_folder(staging.url).read(JOURNAL))["fingerprint"] == plan.fingerprint():
            return True
    raise UserError(f"{staging.url} already exists; name another folder or remove it.")


def claim(staging: Staging, plan: Plan) -> None:
    """Write the journal, or check that an existing one belongs to this plan.

    Raises:
        UserError: another conversion is unfinished there, or the folder has files of no conversion.
    """
    fingerprint = plan.fingerprint()
    sizes = staging.folder.sizes()
    if JOURNAL not in sizes:
        if sizes:
            raise UserError(
                f"{staging.folder.url} holds {next(iter(sizes))} already; name another folder or remove it."
            )
        journal = {"source": plan.source, "fingerprint": fingerprint, **plan.identity}
        staging.folder.write(JOURNAL, (json.dumps(journal, indent=2) + "\n").encode())
        return
    try:
        found = json.loads(staging.folder.read(JOURNAL))
        same, source = found["fingerprint"] == fingerprint, found["source"]
        if not isinstance(source, str):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{staging.folder.join(JOURNAL)}: malformed; remove {staging.folder.url}.") from None
    if not same:
        raise UserError(
            f"{staging.folder.url}: an unfinished conversion of {source} with other settings or another source is "
            f"there; remove it, or finish it with its own command."
        )


def check_sources(checksums: Sequence[Checksum], workers: int, progress: ByteProgress) -> None:
    """Compare files with their SHA-256. Raises UserError for the first mismatch."""
    if not checksums:
        return
    progress.start("checking the source", sum(c.nbytes for c in checksums))
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda c: _check_source(c, progress), checksums))


def _check_source(expected: Checksum, progress: ByteProgress) -> None:
    digest = hashlib.sha256()
    buffer = aligned_buffer(min(PART, expected.nbytes))
    for offset, length in windows(expected.nbytes, PART):
        expected.folder.read_into(expected.name, offset, buffer[:length])
        digest.update(buffer[:length])
        progress.advance(length)
    if digest.hexdigest() != expected.sha256:
        raise UserError(
            f"{expected.folder.join(expected.name)} is damaged, its SHA-256 is not that of the checkpoint's manifest; "
            f"use another checkpoint."
        )


def write_file(folder: Folder, file: OutputFile, workers: int, progress: ByteProgress) -> None:
    """Write one file with several threads."""
    writer = folder.create(file.name, file.size)
    try:
        _fill(writer, file, workers, progress)
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def _fill(writer: FileWriter, file: OutputFile, workers: int, progress: ByteProgress) -> None:
    todo: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    parts = list(windows(file.size, writer.part))
    for window in parts:
        todo.put(window)
    errors: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        buffer = aligned_buffer(min(writer.part, file.size))
        try:
            for offset, length in _drain(todo, stop):
                file.fill(offset, buffer[:length])
                writer.write_at(offset, buffer[:length])
                progress.advance(length)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(parts)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        # On Ctrl-C, no thread may still be writing when the file is abandoned.
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    if errors:
        raise errors[0]


def _drain(todo: queue.SimpleQueue[tuple[int, int]], stop: threading.Event) -> Iterator[tuple[int, int]]:
    while not stop.is_set():
        try:
            yield todo.get_nowait()
        except queue.Empty:
            return
