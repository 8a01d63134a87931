"""Checkpoints of a run: folders that exist whole or not at all.

A checkpoint is a folder ``step_000010`` with a manifest of every file's size and checksum. It is written under a hidden
name, the manifest last, and takes its real name by one rename; whatever a killed process leaves behind is hidden or
fails its manifest, and no reader trusts it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_fleet.checkpoint.manifest import MANIFEST, fingerprint, list_files, read_manifest, sync_folder, write_json
from megatron_fleet.config.errors import UserError
from megatron_fleet.platform.communicator import Communicator, together

log = logging.getLogger(__name__)

T = TypeVar("T")

TRAINER_STATE = "trainer_state.json"


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
        """What the trainer saved beside the shards."""
        return json.loads((self.path / TRAINER_STATE).read_text(encoding="utf-8"))


class Checkpoints:
    """The checkpoints under one folder. Every method is collective over ``comm``, on a file system all ranks see."""

    def __init__(self, folder: Path | str, keep: int, comm: Communicator) -> None:
        """Make the folder; remove what earlier, interrupted saves and removals left in it.

        Args:
            keep: newest checkpoints kept after a save.
        """
        self._folder = Path(folder)
        self._keep = keep
        self._comm = comm
        self._on_rank_0(self._tidy)

    def save(self, step: int, write_state: Callable[[Path], None], trainer_state: dict[str, Any]) -> Checkpoint:
        """Save and commit one checkpoint, then remove the oldest ones beyond ``keep``.

        A step that is committed already stays as it is. Until the commit, earlier checkpoints are untouched.

        Args:
            write_state: called on every rank with the folder to write shards into (``trainer_state.json`` and
                ``manifest.json`` are taken); collectives inside are welcome.
            trainer_state: JSON-able, rank 0's counts.

        Raises:
            TypeError: ``trainer_state`` is not JSON-able; nothing was written.
            Exception: whatever ``write_state`` raised; the other ranks raise PeerError.
        """
        final = self._folder / f"step_{step:06d}"
        if self._on_rank_0(lambda: any(c.path == final for c in self._committed())):
            log.warning("%s is committed already and stays as it is", final)
            return Checkpoint(final, step)
        # A state that cannot be saved is told before the long part of the save.
        self._on_rank_0(lambda: json.dumps(trainer_state))

        def write(partial: Path) -> None:
            write_state(partial)
            if self._comm.rank == 0:
                write_json(partial / TRAINER_STATE, trainer_state)

        save_folder(final, step, write, self._comm)
        self._on_rank_0(self._prune)
        return Checkpoint(final, step)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose files have the sizes of its manifest; ``None`` when there is none.

        Damaged ones are skipped with a warning.
        """
        return self._on_rank_0(lambda: next(iter(self._committed()), None))

    def _on_rank_0(self, call: Callable[[], Any]) -> Any:
        return on_rank_0(call, self._comm)

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

    def _tidy(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for stale in self._folder.glob(".step_*"):
            log.warning("removing %s, left by an interrupted run", stale)
            shutil.rmtree(stale)

    def _prune(self) -> None:
        for old in self._committed()[self._keep :]:
            _remove(old.path)


def save_folder(final: Path, step: int, write: Callable[[Path], None], comm: Communicator) -> None:
    """Write the folder ``final`` whole or not at all: under a hidden name, its manifest last, then one rename.

    Collective over ``comm``, on a file system all ranks see. Until the rename nothing named ``final`` changes; what a
    killed process leaves is called ``.<name>.partial``.

    Args:
        write: called on every rank with the folder to write into (``manifest.json`` is taken).

    Raises:
        Exception: whatever ``write`` raised; the other ranks raise PeerError.
    """
    partial = final.with_name(f".{final.name}.partial")
    try:
        on_rank_0(lambda: _start(partial), comm)
        with together(comm):
            write(partial)
        manifest = {"format": 1, "step": step, "files": _fingerprints(partial, comm)}
        on_rank_0(lambda: _commit(partial, final, manifest), comm)
    except Exception:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def on_rank_0(call: Callable[[], T], comm: Communicator) -> T:
    """``call()`` of rank 0, on every rank; its exception too."""
    result = None
    with together(comm):
        if comm.rank == 0:
            result = call()
    return comm.all_gather(result)[0]


def _start(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()


def _fingerprints(partial: Path, comm: Communicator) -> dict[str, Any]:
    """Size and checksum of every file, each flushed to disk; the work shared by the ranks."""
    mine: dict[str, Any] = {}
    with together(comm):
        for file in list_files(partial)[comm.rank :: comm.size]:
            mine[file.relative_to(partial).as_posix()] = fingerprint(file, flush=True)
    merged = {name: entry for part in comm.all_gather(mine) for name, entry in part.items()}
    return dict(sorted(merged.items()))


def _commit(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    write_json(partial / MANIFEST, manifest)
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
