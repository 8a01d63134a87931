"""Dumps of suspicious optimizer steps: everything needed to replay one in isolation.

A dump is a folder with the configuration, the model's ``config.json``, the data of the update, the trainer's state from
before the step (weights and optimizer, in Megatron's format), and a record of the findings. It exists whole or not at
all (`checkpoint.checkpoints.save_folder`).
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.checkpoint.checkpoints import Checkpoint, Write, save_folder
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.load import dump_resolved
from megatron_fleet.config.schema import Config
from megatron_fleet.storage.folder import Files
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.trainer.base import MicroBatchLoss

SHOWN_NAMES = 3
"""Maximum length of a list of names."""
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
        raise UserError(f"{path} is not a dump, {RECORD} is missing; name a folder below dumps/ of a run's outputs.")
    Checkpoint.open(path)
    try:
        return Dump(path, Record.from_json(read_object(path / RECORD, "use another dump")))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / RECORD} cannot be read ({error}); use the version that wrote it.") from error


class Dumps:
    """The dumps of a run, in one folder."""

    def __init__(self, folder: Path, most: int, config: Config) -> None:
        """Remove leftovers of interrupted saves.

        Args:
            most: dumps that the folder may hold.
            config: of the run; each dump holds all of it, for a replay.
        """
        self._folder, self._most, self._config = folder, most, config
        for stale in folder.glob(".step-*"):
            shutil.rmtree(stale)

    def has_place(self, verdict: Verdict) -> bool:
        """Return whether one more fits. Spikes leave one place for a non-finite step, which stops learning."""
        kept = [open_dump(path).record.verdict for path in self._folder.glob("step-*")]
        return len(kept) < self._most and (verdict != Verdict.SPIKE or kept.count(verdict) < self._most - 1)

    async def save(self, write_state: Write, data: Sequence[Datum], record: Record) -> Path:
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
            await asyncio.to_thread(_write_head, partial, self._config, data, record)
            (partial / STATE).mkdir()
            files = await write_state(partial / STATE)
            return {f"{STATE}/{name}": entry for name, entry in files.items()}

        self._folder.mkdir(parents=True, exist_ok=True)
        await save_folder(final, record.step, write)
        return final


def _write_head(partial: Path, config: Config, data: Sequence[Datum], record: Record) -> None:
    (partial / CONFIG).write_text(dump_resolved(config), encoding="utf-8")
    (partial / MODEL).mkdir()
    shutil.copyfile(Path(config.model.folder) / "config.json", partial / MODEL / "config.json")
    save_data(partial / DATA, data)
    write_atomically(partial / RECORD, json.dumps(record.to_json(), indent=1).encode())


_CORE = ("token_ids", "loss_mask", "scaled_advantages", "behaviour_logprobs")
"""Arrays that every Datum has."""


def save_data(path: Path, data: Sequence[Datum]) -> None:
    """Write ``data`` bit for bit.

    Layout: ``sequences`` int64 is the number of sequences, ``loss_scale`` float64 ``[sequences]``, ``plain`` the values
    of `Datum.extras` that are not arrays, as JSON. Every array of a Datum is one here, of all sequences, concatenated
    along their first axis: ``token_ids``, ``arrays.proximal``, ``extras.routing``; its ``<name>.lengths`` int64
    ``[sequences]`` has the length of each, −1 where a sequence has none.

    Raises:
        TypeError: a Datum holds something else.
    """
    found = [_arrays(datum) for datum in data]
    plain = [
        json.dumps({name: v for name, v in datum.extras.items() if not isinstance(v, np.ndarray)}) for datum in data
    ]
    content = {
        "sequences": np.array(len(data), np.int64),
        "loss_scale": np.array([datum.loss_scale for datum in data], np.float64),
        "plain": np.array(plain, np.str_),
    }
    for name in dict.fromkeys(name for arrays in found for name in arrays):
        values = [arrays.get(name) for arrays in found]
        present = [value for value in values if value is not None]
        if wrong := next((a for a in present if not isinstance(a, np.ndarray) or a.ndim == 0), None):
            raise TypeError(f"Datum.{name} is a {type(wrong).__name__}, not an array")
        content[name] = np.concatenate(present)
        lengths = [-1 if value is None else len(value) for value in values]
        content[f"{name}.lengths"] = np.array(lengths, np.int64)
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **content)


def _arrays(datum: Datum) -> dict[str, np.ndarray]:
    """Arrays of a Datum by their names in a file."""
    arrays = {f"arrays.{name}": values for name, values in datum.arrays.items()}
    extras = {f"extras.{name}": v for name, v in datum.extras.items() if isinstance(v, np.ndarray)}
    return {name: getattr(datum, name) for name in _CORE} | arrays | extras


def load_data(path: Path) -> list[Datum]:
    """Read a file written by `save_data`. Raises UserError when it is damaged, holds objects, or is of an older
    version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            content = dict(file)
        count, scales, plain = int(content.pop("sequences")), content.pop("loss_scale"), content.pop("plain", None)
        columns = {
            name: _split(joined, content[f"{name}.lengths"])
            for name, joined in content.items()
            if not name.endswith(".lengths")
        }
        if plain is not None:
            return [_datum(columns, i, float(scales[i]), json.loads(str(plain[i]))) for i in range(count)]
    except Exception as error:  # zipfile, zlib and numpy raise anything for a damaged archive
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}); it is damaged, or holds something other than arrays."
        ) from None
    raise UserError(f"{path} was written by an older version; replay the dump with that version.")


def _datum(columns: Mapping[str, Sequence[Any]], index: int, scale: float, extras: dict[str, Any]) -> Datum:
    there = {name: values[index] for name, values in columns.items() if values[index] is not None}
    arrays = {name.removeprefix("arrays."): v for name, v in there.items() if name.startswith("arrays.")}
    extras |= {name.removeprefix("extras."): v for name, v in there.items() if name.startswith("extras.")}
    return Datum(**{name: there[name] for name in _CORE}, loss_scale=scale, arrays=arrays, extras=extras)


def _split(joined: np.ndarray, lengths: np.ndarray) -> list[np.ndarray | None]:
    ends = np.cumsum(np.maximum(lengths, 0))
    return [None if n < 0 else joined[end - n : end] for n, end in zip(lengths, ends, strict=True)]


class Verdict(StrEnum):
    """A judgement of an optimizer step."""

    FINE = "fine"
    SPIKE = "spike"
    """Finite, but far above the median of the preceding norms. The step is taken."""
    NOT_FINITE = "not_finite"
    """The step is skipped. A loss can be NaN while the gradient is finite: a clamp stops it in the backward pass."""


@dataclass(frozen=True, slots=True)
class Record:
    """Findings of one optimizer step.

    Attributes:
        step: training step, from 1, as in the metrics.
        part: index of the update in that step, from 0.
        verdict: a `Verdict`.
        device: ``cpu`` or ``cuda``.
        loss: of the whole update.
        grad_norm: before clipping.
        median: of the gradient norms before this one.
        micro_batches, weights, gradients, parameters: see `trainer.base.Examination`.
    """

    step: int
    part: int
    verdict: str
    device: str
    lr: float
    loss: float
    grad_norm: float
    median: float
    micro_batches: list[MicroBatchLoss]
    weights: list[str]
    gradients: list[str]
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; a non-finite number becomes text, since JSON cannot represent it."""
        return json_number(asdict(self))

    @staticmethod
    def from_json(values: dict[str, Any]) -> Record:
        """Inverse of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        try:
            numbers = {name: float(values[name]) for name in ("lr", "loss", "grad_norm", "median")}
            losses = [MicroBatchLoss(list(m["sequences"]), float(m["loss"])) for m in values["micro_batches"]]
        except OverflowError as error:  # an integer of hundreds of digits
            raise ValueError(str(error)) from error
        return Record(**{**values, **numbers, "micro_batches": losses})


def json_number(value: Any) -> Any:
    """Return ``value`` with every non-finite float, at any depth, as text: nan, inf or -inf."""
    if isinstance(value, dict):
        return {key: json_number(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_number(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def shorten(names: Sequence[str]) -> str:
    """Join the first names, followed by the number of the others."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
