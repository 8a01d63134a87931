"""Dumps of suspicious optimizer steps: everything needed to replay one in isolation.

A dump is a folder with the configuration, the model's ``config.json``, the data of the update, the trainer's state from
before the step (weights and optimizer, in Megatron's format), and a record of the findings. It exists whole or not at
all (`checkpoint.checkpoints.save_folder`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Write, save_folder
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.load import dump_resolved
from megatron_fleet.config.schema import Config
from megatron_fleet.debug.data_file import load_data, save_data
from megatron_fleet.debug.record import Record, Verdict
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.trainer.base import Files

CONFIG, MODEL, RECORD, DATA, STATE = "config.json", "model", "record.json", "data.npz", "state"


@dataclass(frozen=True, slots=True)
class Dump:
    """An opened dump."""

    path: Path
    record: Record

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG

    @property
    def model(self) -> Path:
        """A folder with the model's ``config.json``, and nothing else."""
        return self.path / MODEL

    @property
    def state(self) -> Path:
        """A folder for `trainer.base.Trainer.load_state`."""
        return self.path / STATE

    def data(self) -> list[Datum]:
        """Load the data of the update, in its order."""
        return load_data(self.path / DATA)


def open_dump(path: Path) -> Dump:
    """Open a dump, after comparing the sizes of its files with its manifest.

    Raises:
        UserError: the folder is not a dump, or is damaged.
    """
    if not (path / RECORD).is_file():
        raise UserError(f"{path}: is no dump, {RECORD} is missing; name a folder below dumps/ of a run's outputs.")
    Checkpoint.open(path)
    try:
        return Dump(path, Record.from_json(read_object(path / RECORD, "use another dump")))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / RECORD}: cannot be read ({error}); use the version that wrote it.") from error


class Dumps:
    """The dumps of a run, in one folder."""

    def __init__(self, folder: Path, most: int) -> None:
        """Remove leftovers of interrupted saves. ``most``: dumps that the folder may hold."""
        self._folder, self._most = folder, most
        for stale in folder.glob(".step-*"):
            shutil.rmtree(stale)

    def has_place(self, verdict: Verdict) -> bool:
        """Whether one more may be written. Spikes leave one place for a non-finite step, which stops learning."""
        kept = [open_dump(path).record.verdict for path in self._folder.glob("step-*")]
        return len(kept) < self._most and (verdict != Verdict.SPIKE or kept.count(verdict) < self._most - 1)

    async def save(self, config: Config, write_state: Write, data: Sequence[Datum], record: Record) -> Path:
        """Write one dump; called before the step changes anything. An existing one stays as it is.

        Args:
            write_state: `trainer.base.Trainer.save_state`.
            data: of the update.

        Raises:
            OSError: it cannot be written.
        """
        final = self._folder / f"step-{record.step:06d}.{record.part}"
        if final.exists():
            return final

        async def write(partial: Path) -> Files:
            await asyncio.to_thread(_write_head, partial, config, data, record)
            (partial / STATE).mkdir()
            files = await write_state(partial / STATE)
            return {f"{STATE}/{name}": entry for name, entry in files.items()}

        self._folder.mkdir(parents=True, exist_ok=True)
        await save_folder(final, record.step, write)
        return final


def _write_head(partial: Path, config: Config, data: Sequence[Datum], record: Record) -> None:
    (partial / CONFIG).write_text(dump_resolved(config), encoding="utf-8")
    (partial / MODEL).mkdir()
    shutil.copyfile(Path(config.model.path) / "config.json", partial / MODEL / "config.json")
    save_data(partial / DATA, data)
    write_atomically(partial / RECORD, json.dumps(record.to_json(), indent=1).encode())
