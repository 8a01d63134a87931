"""Optimizer steps that looked wrong, on disk: what it takes to run one of them again, alone.

A dump is a folder with the configuration, the model's ``config.json``, the rows of every data-parallel rank, the policy
as it was before the step (weights and optimizer, in Megatron's format), and a record of what was seen. It exists whole
or not at all (`checkpoint.checkpoints.save_folder`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.checkpoint.checkpoints import Checkpoint, on_rank_0, save_folder
from megatron_fleet.checkpoint.manifest import write_json
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import dump_resolved
from megatron_fleet.config.schema import Config
from megatron_fleet.loop.safety import Verdict
from megatron_fleet.platform.communicator import Communicator
from megatron_fleet.trainer.base import Rows
from megatron_fleet.trainer.rows_file import load_rows, save_rows

if TYPE_CHECKING:
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

CONFIG, MODEL, RECORD, STATE = "config.json", "model", "record.json", "state"


@dataclass(frozen=True, slots=True)
class Record:
    """What was seen of one optimizer step, over all ranks.

    Attributes:
        step: training step, from 1, as in the metrics.
        part: which update of that step, from 0.
        verdict: a `Verdict`.
        device: ``cpu`` or ``cuda``.
        loss: of the whole batch.
        grad_norm: before clipping.
        median: of the gradient norms before this one.
        row_losses: by data-parallel rank and row.
        weights, gradients, parameters: see `Faults`.
    """

    step: int
    part: int
    verdict: str
    device: str
    lr: float
    loss: float
    grad_norm: float
    median: float
    row_losses: list[list[float]]
    weights: list[str]
    gradients: list[str]
    parameters: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; a number that is not finite becomes text, which JSON can hold."""
        return json_number(asdict(self))

    @staticmethod
    def from_json(values: dict[str, Any]) -> Record:
        """What `to_json` gave."""
        numbers = {name: float(values[name]) for name in ("lr", "loss", "grad_norm", "median")}
        losses = [[float(loss) for loss in rank] for rank in values["row_losses"]]
        return Record(**{**values, **numbers, "row_losses": losses})


def json_number(value: Any) -> Any:
    """``value`` with every float that is not finite, wherever it is inside, as text: nan, inf or -inf."""
    if isinstance(value, dict):
        return {key: json_number(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_number(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
        """What `Policy.load_state` reads."""
        return self.path / STATE

    def rows(self) -> list[list[list[Datum]]]:
        """The rows of every data-parallel rank."""
        return [load_rows(self.path / _rows_name(rank)) for rank in range(len(self.record.row_losses))]


def open_dump(path: Path) -> Dump:
    """Open a dump, after comparing its files with its manifest.

    Raises:
        UserError: it is none, or it is damaged.
    """
    if not (path / RECORD).is_file():
        raise UserError(f"{path}: is no dump, {RECORD} is missing; name a folder below dumps/ of a run's outputs.")
    Checkpoint.open(path)
    try:
        return Dump(path, Record.from_json(json.loads((path / RECORD).read_text(encoding="utf-8"))))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / RECORD}: cannot be read ({error}); use the version that wrote it.") from error


class Dumps:
    """The dumps of a run, in one folder. Every method is collective over ``world``."""

    def __init__(self, folder: Path, most: int, world: Communicator) -> None:
        """Remove what interrupted saves left. ``most``: dumps that the folder may hold."""
        self._folder, self._most, self._world = folder, most, world
        on_rank_0(self._tidy, world)

    def room(self, verdict: Verdict) -> bool:
        """Whether one more may be written. Spikes leave one place to what is not finite, which stops learning."""

        def count() -> bool:
            kept = [open_dump(path).record.verdict for path in self._folder.glob("step-*")]
            return len(kept) < self._most and (verdict != Verdict.SPIKE or kept.count(verdict) < self._most - 1)

        return on_rank_0(count, self._world)

    def save(self, config: Config, policy: MegatronPolicy, rows: Rows, record: Record) -> Path:
        """Write one dump; called before the step changes anything. One that exists already stays as it is.

        Args:
            rows: this rank's.

        Raises:
            OSError: it cannot be written; other ranks raise PeerError.
        """
        final = self._folder / f"step-{record.step:06d}.{record.part}"
        if on_rank_0(final.exists, self._world):
            return final
        owners = self._world.all_gather(policy.dp_rank)

        def write(partial: Path) -> None:
            if self._world.rank == 0:
                _write_head(partial, config, record)
            if owners.index(policy.dp_rank) == self._world.rank:
                save_rows(partial / _rows_name(policy.dp_rank), rows)
            try:
                policy.save_state(partial / STATE)
            except CheckpointException as error:  # no Exception, upstream
                raise OSError(str(error)) from error

        on_rank_0(lambda: self._folder.mkdir(parents=True, exist_ok=True), self._world)
        save_folder(final, record.step, write, self._world)
        return final

    def _tidy(self) -> None:
        for stale in self._folder.glob(".step-*"):
            shutil.rmtree(stale)


def _write_head(partial: Path, config: Config, record: Record) -> None:
    (partial / CONFIG).write_text(dump_resolved(config), encoding="utf-8")
    (partial / MODEL).mkdir()
    shutil.copyfile(Path(config.model.path) / "config.json", partial / MODEL / "config.json")
    write_json(partial / RECORD, record.to_json())


def _rows_name(data_rank: int) -> str:
    return f"rows_{data_rank:04d}.npz"


def gather_row_losses(policy: MegatronPolicy, losses: Sequence[float], world: Communicator) -> list[list[float]]:
    """By data-parallel rank; ranks that evaluated no loss (earlier pipeline stages) give none. Collective."""
    found: dict[int, list[float]] = {rank: [] for rank in range(policy.dp_size)}
    for data_rank, values in world.all_gather((policy.dp_rank, list(losses))):
        found[data_rank] = found[data_rank] or values
    return list(found.values())
