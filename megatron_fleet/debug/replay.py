"""``mfleet debug replay``: the forward and backward pass of a dumped optimizer step again, alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.algorithms.losses import make_loss
from megatron_fleet.config.load import load_resolved
from megatron_fleet.config.schema import Config, Parallel
from megatron_fleet.debug.dumps import Dump, open_dump
from megatron_fleet.debug.report import Found, RowFound, SequenceFound, to_json, to_text
from megatron_fleet.loop.safety import Verdict
from megatron_fleet.platform.communicator import TorchCommunicator
from megatron_fleet.platform.device import device
from megatron_fleet.trainer.base import Rows
from megatron_fleet.trainer.megatron.faults import Faults, find_faults
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.row_losses import SequenceLosses

SAME_ORDER = 1e-6
"""Relative tolerance in the same layout on CPU, where the same sums are computed in the same order."""
OTHER_ORDER = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative tolerance by `model.dtype` in another layout or on a GPU."""

Place = tuple[int, int]
"""Data-parallel rank and row, as recorded."""


def main(folder: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Replay the dump in ``folder`` and print, on rank 0, what came out.

    Alone it runs in one process; under torchrun or srun in the layout of the run, unless ``overrides`` say otherwise.

    Returns:
        0 when the step was reproduced, else 1.

    Raises:
        UserError: the dump cannot be read, or the layout does not fit.
    """
    dump = open_dump(folder)
    recorded = load_resolved(dump.config_file)
    # The state of a run with adapters has them alone: what they are beside comes from the model of the run.
    model = recorded.model.path if recorded.policy.lora.rank else str(dump.model.absolute())
    config = load_resolved(dump.config_file, [f"model.path={model}", *overrides])
    if "RANK" not in os.environ and not any(text.startswith("parallel.") for text in overrides):
        config = config.model_copy(update={"parallel": Parallel()})
    found = replay(dump, config, same_layout=config.parallel == recorded.parallel)
    if int(os.environ.get("RANK", "0")) == 0:
        print(to_json(found) if as_json else to_text(found), flush=True)
    return 1 if found.differences() else 0


def replay(dump: Dump, config: Config, same_layout: bool) -> Found:
    """Load the state, run forward and backward over the rows, take the step; collective over the ranks.

    Args:
        config: of the replay; its ``model.path`` needs ``config.json`` only, except with adapters.
        same_layout: it is the layout of the run.
    """
    record, recorded_rows = dump.record, dump.rows()
    with closing(MegatronPolicy(config, init="none")) as policy:
        world = TorchCommunicator()
        policy.load_state(dump.state)
        places = deal(recorded_rows, policy.dp_size)[policy.dp_rank]
        rows = [recorded_rows[place[0]][place[1]] if place else [] for place in places]
        with _progress(world.rank == 0 and sys.stderr.isatty(), len(rows)) as advance:
            losses = SequenceLosses(make_loss(config.algorithm), rows, advance)
            report = policy.forward_backward(rows, losses)
        seen: list[tuple[float, Faults]] = []

        def inspect(norm: float) -> bool:
            seen.append((norm, find_faults(policy.model_chunks)))
            return record.verdict != Verdict.NOT_FINITE

        policy.optim_step(record.lr, inspect)
        mine = list(zip(places, losses.values(), losses.sequences, strict=False))
        everywhere = {place: (loss, parts) for part in world.all_gather(mine) for place, loss, parts in part if place}
    ((norm, faults),) = seen
    same_order = same_layout and device().type == record.device == "cpu"
    return Found(
        dump=str(dump.path),
        verdict=record.verdict,
        same_layout=same_layout,
        tolerance=SAME_ORDER if same_order else OTHER_ORDER[config.model.dtype],
        loss=(record.loss, report.loss),
        grad_norm=(record.grad_norm, norm),
        weights=(record.weights, faults.weights),
        gradients=(record.gradients, faults.gradients),
        parameters=faults.parameters,
        rows=[_row(dump, recorded_rows, place, *everywhere[place]) for place in sorted(everywhere)],
    )


def deal(recorded: Sequence[Rows], size: int) -> list[list[Place | None]]:
    """Rows for ``size`` data-parallel ranks: as they were when that is their number, else one after the other.

    Args:
        recorded: the rows of each data-parallel rank of the run.

    Returns:
        For each rank places of recorded rows that hold sequences, ``None`` for an empty row; the same number on every
        rank.
    """
    places = [[(rank, at) if row else None for at, row in enumerate(rows)] for rank, rows in enumerate(recorded)]
    if size == len(recorded):
        return places
    flat: list[Place | None] = [place for rank in places for place in rank if place]
    flat += [None] * (-len(flat) % size if flat else size)
    return [flat[rank::size] for rank in range(size)]


def _row(dump: Dump, recorded: Sequence[Rows], place: Place, loss: float, sequences: Sequence[float]) -> RowFound:
    data_rank, row = place
    parts = [
        SequenceFound(len(datum), value, not_finite(datum))
        for datum, value in zip(recorded[data_rank][row], sequences, strict=True)
    ]
    return RowFound(data_rank, row, dump.record.row_losses[data_rank][row], loss, parts)


def not_finite(datum: Datum) -> list[str]:
    """Fields with a value that is not finite at a trained token."""
    values = {f.name: getattr(datum, f.name) for f in fields(datum)}
    arrays = {name: a for name, a in values.items() if isinstance(a, np.ndarray) and a.dtype.kind == "f"}
    return [name for name, array in arrays.items() if not np.isfinite(array[datum.mask != 0]).all()]


@contextmanager
def _progress(shown: bool, rows: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("", total=rows)
        yield lambda: bar.advance(task)
