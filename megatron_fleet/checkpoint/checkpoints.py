"""Checkpoints of a run: folders that exist whole or not at all.

A checkpoint is a folder ``step_000010`` with a manifest of every file's size and checksum. It is written under a hidden
name, the manifest last, and takes its real name by one rename; whatever a killed process leaves behind is hidden or
fails its manifest, and no reader trusts it. The trainer writes and fingerprints its state; the controller does the
rest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_fleet.checkpoint.manifest import MANIFEST, DamagedCheckpoint, check_hashes, read_manifest
from megatron_fleet.config import units
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.platform.waiting import finish_in_thread
from megatron_fleet.storage.folder import Files
from megatron_fleet.storage.local import (
    begin_folder,
    commit_folder,
    fingerprint,
    list_files,
    remove_folder,
    rename_folder,
    write_atomically,
)

log = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"
SUPERSEDED = ".superseded"
"""Suffix of the name of a checkpoint that no longer counts, because the run went on from an earlier one."""
RECORDS = "records"
"""Folder of a checkpoint with copies of the run's records."""

Write = Callable[[Path], Awaitable[Files]]
"""Function that writes files into an existing folder and returns those that it flushed to disk and fingerprinted, as
`trainer.base.Trainer.save_state` does.
"""

Copy = Callable[[Path], Awaitable[Awaitable[Files]]]
"""Function that copies state, and returns what writes the copy as `Write` does: `trainer.base.Ranks.copy_state`."""

Publish = Callable[["Checkpoint"], Awaitable[None]]
"""Function that puts a checkpoint where it is to be kept. The folder has the manifest and those of the files that lie
on this host, and is removed afterwards."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint."""

    path: Path
    step: int

    @staticmethod
    def open(path: Path | str) -> Checkpoint:
        """Open the checkpoint at ``path``, after comparing the size of every file with the manifest.

        Raises:
            UserError: naming the file and what is wrong with it.
        """
        path = Path(path)
        manifest = read_manifest(path)
        for name, expected in manifest["files"].items():
            file = path / name
            if not os.path.isfile(file):  # False also for a name that no file can have
                raise DamagedCheckpoint(f"{file} is missing although the checkpoint's {MANIFEST} lists it.")
            if (size := file.stat().st_size) != expected["bytes"]:
                raise DamagedCheckpoint(
                    f"{file} has {size} bytes, the checkpoint's {MANIFEST} says {expected['bytes']}."
                )
        return Checkpoint(path, manifest["step"])

    def files(self) -> dict[str, dict[str, Any]]:
        """Size and checksum of each file, by its name."""
        return dict(read_manifest(self.path)["files"])

    def verify(self, stop: threading.Event | None = None) -> None:
        """Read every file and compare its SHA-256 with the manifest; long reads show progress.

        Arguments and errors are those of `check_hashes`.
        """
        check_hashes(self.path, read_manifest(self.path)["files"], stop or threading.Event())

    def trainer_state(self) -> dict[str, Any]:
        """Controller state, saved next to the trainer's shards. Raises UserError when it is not a JSON object."""
        return read_object(self.path / TRAINER_STATE, "use another checkpoint")


@dataclass(frozen=True, slots=True)
class Copied:
    """Copy of a trainer's state that is being written under a hidden name; `Checkpoints.commit` makes a checkpoint of
    it. One that is never committed is removed by the next save.
    """

    step: int
    partial: Path
    writing: asyncio.Future[Files]


class Checkpoints:
    """Checkpoints in one folder, which the ranks can read too, unless `commit` is given a function that publishes them.

    Attributes:
        folder: where they are.
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int,
        keep_also: Callable[[Sequence[int]], set[int]] = lambda steps: set(),
        records: Sequence[Path] = (),
    ) -> None:
        """Change nothing on disk.

        Args:
            keep: newest checkpoints kept after a save.
            keep_also: of the steps of all checkpoints, newest first, returns those that are kept besides.
            records: files of which a checkpoint holds a copy, those that exist, for a resume in an empty folder.
        """
        self.folder = Path(folder)
        self._keep, self._keep_also, self._records = keep, keep_also, list(records)
        self._damaged: set[Path] = set()
        self.in_use: Callable[[], set[int]] = set
        """Returns the steps whose checkpoints are being read: they are kept besides, too."""

    async def save(self, step: int, write_state: Write, trainer_state: dict[str, Any]) -> Checkpoint | None:
        """Save and commit one checkpoint: `copy` and `commit` in one.

        Args:
            write_state: writes the trainer's shards.

        Returns:
            ``None`` when the step was committed already and nothing is written.
        """

        async def copy(partial: Path) -> Awaitable[Files]:
            return _known(await write_state(partial))

        copied = await self.copy(step, copy)
        return None if copied is None else await self.commit(copied, trainer_state)

    async def copy(self, step: int, copy_state: Copy) -> Copied | None:
        """Copy the trainer's state for a checkpoint, and begin to write it. One at a time.

        A step that is already committed stays as it is, unless it is damaged. Until the commit, earlier checkpoints are
        untouched; leftovers of interrupted saves and removals are deleted.

        Args:
            copy_state: copies the trainer's state, then writes its shards (``trainer_state.json``, ``manifest.json``
                and ``records`` are reserved).

        Returns:
            The copy for `commit`. ``None`` when the step was committed already and nothing is written.

        Raises:
            UserError: the disk has less room than the newest checkpoint takes.
            Exception: whatever ``copy_state`` raised.
        """
        final = self.path_of(step)
        committed = self.committed()
        if any(checkpoint.path == final for checkpoint in committed):
            log.warning("%s is committed already and stays as it is", final)
            return None
        await finish_in_thread(self._prepare)
        self._check_room(committed[:1])
        partial = begin_folder(final)
        try:
            writing = await copy_state(partial)
        except Exception:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return Copied(step, partial, asyncio.ensure_future(writing))

    def commit(
        self,
        copied: Copied,
        trainer_state: dict[str, Any],
        publish: Publish | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Coroutine[Any, Any, Checkpoint]:
        """Take the controller's state and the records as they are now, and return a coroutine that commits them with
        the copied state: it waits for the shards, removes the oldest checkpoints beyond ``keep``, and returns the new
        one.

        Args:
            trainer_state: JSON-able state of the controller.
            publish: for ranks on hosts that do not share this folder; nothing is committed here then.
            files: further files of the controller, by name.

        Raises:
            TypeError: ``trainer_state`` is not JSON-able.
            UserError: in the coroutine: the controller does not see what the ranks wrote.
            Exception: in the coroutine: whatever writing the copy raised.
        """
        small = {TRAINER_STATE: json.dumps(trainer_state, indent=1).encode(), **files}
        small |= {f"{RECORDS}/{record.name}": record.read_bytes() for record in self._records if record.exists()}
        return self._finish(copied, small, publish)

    async def _finish(self, copied: Copied, small: Mapping[str, bytes], publish: Publish | None) -> Checkpoint:
        async def write(partial: Path) -> Files:
            files = await copied.writing
            for name, content in small.items():
                (partial / name).parent.mkdir(exist_ok=True)
                write_atomically(partial / name, content)
            return files

        partial, final = copied.partial, self.path_of(copied.step)
        if publish is None:
            await _fill(partial, final, copied.step, write)
        else:
            try:
                await finish_in_thread(_seal, partial, copied.step, await write(partial))
                await publish(Checkpoint(partial, copied.step))
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        self._damaged.discard(final)
        await finish_in_thread(self.prune)
        return Checkpoint(final, copied.step)

    def newest(self, stop: threading.Event | None = None) -> Checkpoint | None:
        """Newest checkpoint whose files match its manifest; ``None`` when no save ever finished.

        Reads every byte of it. Damaged ones are reported, do not count towards ``keep``, and are replaced when their
        step is saved.

        Args:
            stop: see `check_hashes`.

        Raises:
            UserError: there are checkpoints, and all are damaged.
        """
        faults = []
        for path in self.folders():
            try:
                found = Checkpoint.open(path)
                found.verify(stop)
            except UserError as error:
                self._damaged.add(path)
                faults.append(str(error))
                continue
            for fault in faults:
                log.warning("skipping a damaged checkpoint: %s", fault)
            if faults:
                log.warning("the run resumes from step %d, %s", found.step, path)
            return found
        if faults:
            raise UserError(
                f"{faults[0].rstrip('.')}, and {self.folder} has no other checkpoint that is whole; restore the file, "
                f"choose another run.out, or start over with run.resume=never, which moves the records of this run "
                f"aside."
            )
        return None

    async def newest_in_thread(self) -> Checkpoint | None:
        """Run `newest` without blocking the event loop; stops when cancelled."""
        stop = threading.Event()
        try:
            return await asyncio.to_thread(self.newest, stop)
        finally:
            stop.set()

    def of_step(self, step: int, stop: threading.Event | None = None) -> Checkpoint | None:
        """The verified checkpoint of a step; ``None`` when there is none. Raises UserError when it is damaged."""
        path = self.path_of(step)
        if not path.exists():
            return None
        found = Checkpoint.open(path)
        found.verify(stop)
        return found

    def path_of(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / f"step_{step:06d}"

    def superseded(self) -> list[Path]:
        """Folders of the checkpoints that no longer count."""
        return sorted(self.folder.glob(f"step_*{SUPERSEDED}"))

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove folders of checkpoints."""
        for path in paths:
            remove_folder(path)

    def set_later_aside(self, step: int) -> None:
        """Rename checkpoints of steps after ``step`` to ``<name>.superseded``: they no longer count."""
        for path in self.folders():
            if int(path.name.partition("_")[2]) > step:
                rename_folder(path, f"{path.name}{SUPERSEDED}")
                log.warning("%s no longer counts and is now %s%s", path, path.name, SUPERSEDED)

    def folders(self) -> list[Path]:
        """Folders of all checkpoints, newest first."""
        found = [path for path in self.folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
        return sorted(found, key=lambda path: int(path.name.partition("_")[2]), reverse=True)

    def committed(self) -> list[Checkpoint]:
        """Checkpoints not known to be damaged, newest first. Compares sizes only."""
        found = []
        for path in self.folders():
            if path not in self._damaged:
                try:
                    found.append(Checkpoint.open(path))
                except UserError as e:
                    log.warning("skipping checkpoint %s: %s", path.name, e)
        return found

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob(".step_*"):
            log.warning("removing %s, left by an interrupted run", stale)
            if stale.is_symlink():
                stale.unlink()
            else:
                shutil.rmtree(stale)

    def _check_room(self, newest: Sequence[Checkpoint]) -> None:
        for checkpoint in newest:
            needed = sum(entry["bytes"] for entry in read_manifest(checkpoint.path)["files"].values())
            if (free := shutil.disk_usage(self.folder).free) < needed:
                raise UserError(
                    f"{self.folder}: the disk has {units.size(free)} left, and the last checkpoint took "
                    f"{units.size(needed)}; make room, or lower checkpoint.keep."
                )

    def prune(self) -> None:
        """Remove the checkpoints that need not be kept, judged by the records as they are now."""
        committed = self.committed()
        kept = self._keep_also([checkpoint.step for checkpoint in committed]) | self.in_use()
        for old in committed[self._keep :]:
            if old.step not in kept:
                remove_folder(old.path)


async def save_folder(final: Path, step: int, write: Write) -> None:
    """Write the folder ``final`` whole or not at all: under a hidden name, its manifest last, then one rename.

    Nothing named ``final`` changes before the rename; a killed process leaves only ``.<name>.partial``. A commit that
    has begun is finished before a cancellation is raised: whoever looks for the newest checkpoint then finds it.

    Args:
        write: fills the folder (``manifest.json`` is reserved). Files that it does not return are small: they are
            flushed and fingerprinted here.

    Raises:
        UserError: a file that ``write`` returned is missing or differs in size.
        Exception: whatever ``write`` raised.
    """
    await _fill(begin_folder(final), final, step, write)


async def _fill(partial: Path, final: Path, step: int, write: Write) -> None:
    try:
        files = await write(partial)
        await finish_in_thread(_commit, partial, final, step, files)
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise


async def _known(files: Files) -> Files:
    return files


def _commit(partial: Path, final: Path, step: int, written: Files) -> None:
    for name, entry in written.items():
        file = partial / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise UserError(
                f"{file}: a rank wrote {entry['bytes']} bytes that the controller does not see; put run.out on a file "
                f"system that all hosts share."
            )
    _seal(partial, step, written)
    # In place of an older one only where the caller found that it fails its manifest: it is unreadable.
    commit_folder(partial, final)


def _seal(partial: Path, step: int, written: Files) -> None:
    """Write the manifest of the files that ranks wrote, wherever, and of the others in the folder."""
    files = dict(written)
    for file in list_files(partial):
        if (name := file.relative_to(partial).as_posix()) not in files:
            files[name] = fingerprint(file, flush=True)
    manifest = {"format": 1, "step": step, "files": dict(sorted(files.items()))}
    write_atomically(partial / MANIFEST, json.dumps(manifest, indent=1).encode())


def kept_besides(steps: Sequence[int], every: int, scores: Mapping[int, float]) -> set[int]:
    """Steps whose checkpoints are kept besides the newest ones.

    Args:
        every: multiples of this are kept; 0: none.
        scores: by step; of ``steps``, the one with the highest score is kept, of equal ones the newest.
    """
    best = max((step for step in steps if step in scores), key=lambda step: (scores[step], step), default=None)
    return {step for step in steps if (every and step % every == 0) or step == best}
