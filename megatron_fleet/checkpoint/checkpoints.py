"""Checkpoints of a run: folders that exist whole or not at all.

A checkpoint is a folder ``step_000010`` with a manifest of every file's size and checksum. It is written under a hidden
name, the manifest last, and takes its real name by one rename; whatever a killed process leaves behind is hidden or
fails its manifest, and no reader trusts it. The trainer writes its state and fingerprints it; the rest is the
controller's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.checkpoint.manifest import MANIFEST, read_manifest, sync_folder, write_json
from megatron_fleet.config.errors import UserError
from megatron_fleet.storage.fingerprint import fingerprint, list_files
from megatron_fleet.trainer.base import Files

log = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"

Write = Callable[[Path], Awaitable[Files]]
"""Writes files into a folder that exists; returns those that it flushed to disk and fingerprinted, as
`trainer.base.Trainer.save_state` does."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint."""

    path: Path
    step: int

    @staticmethod
    def open(path: Path | str, checksums: bool = False) -> Checkpoint:
        """The checkpoint at ``path``, after comparing every file with the manifest.

        Args:
            checksums: read every file and compare its SHA-256 too; otherwise sizes only.

        Raises:
            UserError: naming the file and what is wrong with it.
        """
        path = Path(path)
        manifest = read_manifest(path)
        for name, expected in manifest["files"].items():
            file = path / name
            if not file.is_file():
                raise UserError(f"{file}: is missing although the checkpoint's {MANIFEST} lists it.")
            found = fingerprint(file) if checksums else {"bytes": file.stat().st_size}
            for key, value in found.items():
                if value != expected[key]:
                    raise UserError(f"{file}: {key} is {value}, the checkpoint's {MANIFEST} says {expected[key]}.")
        return Checkpoint(path, manifest["step"])

    def trainer_state(self) -> dict[str, Any]:
        """State of the controller, saved beside the trainer's shards."""
        return json.loads((self.path / TRAINER_STATE).read_text(encoding="utf-8"))


class Checkpoints:
    """The checkpoints under one folder, on a file system that the controller and all ranks see."""

    def __init__(self, folder: Path | str, keep: int) -> None:
        """Make the folder; remove what earlier, interrupted saves and removals left in it.

        Args:
            keep: newest checkpoints kept after a save.
        """
        self._folder = Path(folder)
        self._keep = keep
        self._folder.mkdir(parents=True, exist_ok=True)
        for stale in self._folder.glob(".step_*"):
            log.warning("removing %s, left by an interrupted run", stale)
            shutil.rmtree(stale)

    async def save(self, step: int, write_state: Write, trainer_state: dict[str, Any]) -> Checkpoint:
        """Save and commit one checkpoint, then remove the oldest ones beyond ``keep``.

        A step that is committed already stays as it is. Until the commit, earlier checkpoints are untouched.

        Args:
            write_state: writes the trainer's shards (``trainer_state.json`` and ``manifest.json`` are taken).
            trainer_state: JSON-able state of the controller.

        Raises:
            TypeError: ``trainer_state`` is not JSON-able; nothing was written.
            UserError: the controller does not see what the ranks wrote.
            Exception: whatever ``write_state`` raised.
        """
        final = self._folder / f"step_{step:06d}"
        if any(checkpoint.path == final for checkpoint in self._committed()):
            log.warning("%s is committed already and stays as it is", final)
            return Checkpoint(final, step)
        json.dumps(trainer_state)  # a state that cannot be saved is refused before the long part of the save

        async def write(partial: Path) -> Files:
            files = await write_state(partial)
            write_json(partial / TRAINER_STATE, trainer_state)
            return files

        await save_folder(final, step, write)
        await asyncio.to_thread(self._prune)
        return Checkpoint(final, step)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose files have the sizes of its manifest; ``None`` when there is none.

        Damaged ones are skipped with a warning.
        """
        return next(iter(self._committed()), None)

    def _committed(self) -> list[Checkpoint]:
        """Whole checkpoints, newest first."""
        found = []
        for path in self._folder.iterdir():
            if re.fullmatch(r"step_\d+", path.name):
                try:
                    found.append(Checkpoint.open(path))
                except UserError as e:
                    log.warning("skipping checkpoint %s: %s", path.name, e)
        return sorted(found, key=lambda c: c.step, reverse=True)

    def _prune(self) -> None:
        for old in self._committed()[self._keep :]:
            _remove(old.path)


async def save_folder(final: Path, step: int, write: Write) -> None:
    """Write the folder ``final`` whole or not at all: under a hidden name, its manifest last, then one rename.

    Until the rename nothing named ``final`` changes; what a killed process leaves is called ``.<name>.partial``.

    Args:
        write: fills the folder (``manifest.json`` is taken). Files that it does not return are small: they are flushed
            and fingerprinted here.

    Raises:
        UserError: a file that ``write`` returned is not there in its size.
        Exception: whatever ``write`` raised.
    """
    partial = final.with_name(f".{final.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        files = await write(partial)
        await asyncio.to_thread(_commit, partial, final, step, files)
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _commit(partial: Path, final: Path, step: int, written: Files) -> None:
    for name, entry in written.items():
        file = partial / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise UserError(
                f"{file}: a rank wrote {entry['bytes']} bytes that the controller does not see; put run.out on a file "
                f"system that all hosts share."
            )
    files = dict(written)
    for file in list_files(partial):
        if (name := file.relative_to(partial).as_posix()) not in files:
            files[name] = fingerprint(file, flush=True)
    write_json(partial / MANIFEST, {"format": 1, "step": step, "files": dict(sorted(files.items()))})
    for folder in (partial, *(d for d in partial.rglob("*") if d.is_dir())):
        sync_folder(folder)
    if final.exists():
        # The caller found that it fails its manifest: nobody can read it.
        _remove(final)
    os.rename(partial, final)
    sync_folder(final.parent)


def _remove(path: Path) -> None:
    """Remove a checkpoint; hidden first, so that no half-removed one ever looks like a checkpoint."""
    hidden = path.with_name(f".{path.name}.removed")
    os.rename(path, hidden)
    shutil.rmtree(hidden)
