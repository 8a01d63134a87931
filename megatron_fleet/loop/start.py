"""Start of a run: its tasks, and its newest good checkpoint or an earlier run's records moved aside."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from megatron_fleet.checkpoint.checkpoints import Checkpoint, Checkpoints
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.data.dataset import run_dataset, save_manifest
from megatron_fleet.data.task import Task
from megatron_fleet.evaluation.evaluator import choose, notes
from megatron_fleet.storage.run_folder import RunFolder

log = logging.getLogger(__name__)

_RECORDS = ("checkpoints", "metrics.jsonl")
"""Outputs of a run that reached its first step or checkpoint; starting from scratch would replace them."""


def find_start(config: Config, checkpoints: Checkpoints) -> Checkpoint | None:
    """Find the checkpoint to resume from; ``None``: start from scratch. Nothing is changed.

    Raises:
        UserError: there are checkpoints and all are damaged, or the newest is beyond ``run.steps``.
    """
    if config.run.resume == "never":
        return None
    found = checkpoints.newest()
    if found is not None and found.step > config.run.steps:
        raise UserError(
            f"run.steps={config.run.steps} is below step {found.step} of {found.path}; raise it or choose another "
            f"run.out."
        )
    return found


def set_aside(config: Config) -> None:
    """Rename ``run.out``, if it has the records of a run, to ``<run.out>.1``, or the next free number.

    Raises:
        UserError: another process uses the folder, this run needs something in it, or it cannot be renamed.
    """
    out = Path(config.run.out).resolve()
    if not any((out / name).exists() for name in _RECORDS):
        return
    with RunFolder(out, config.run.name):
        _rename(config, out)


def _rename(config: Config, out: Path) -> None:
    for place in (os.getcwd(), *_paths(config.model_dump(mode="json", exclude={"run"}))):
        if Path(place).resolve().is_relative_to(out):
            raise UserError(
                f"run.out={config.run.out}: run.resume=never moves this folder aside, and the run needs {place} in it; "
                f"choose another run.out."
            )
    aside = next(path for n in count(1) if not (path := out.with_name(f"{out.name}.{n}")).exists())
    try:
        out.rename(aside)
        out.mkdir()
    except OSError as error:
        raise UserError(
            f"run.out={config.run.out}: cannot be renamed to {aside} ({error.strerror}), as run.resume=never wants; "
            f"choose another run.out."
        ) from None
    log.warning("run.resume=never: what an earlier run left in %s is now in %s", config.run.out, aside)


def _paths(values: Any) -> Iterator[str]:
    """Yield every string in ``values`` that is an existing path."""
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _paths(value)
    elif isinstance(values, str) and values and os.path.exists(values):
        yield values


def load_data(config: Config) -> tuple[list[Task], list[Task]]:
    """Load the training and held-out tasks; the split is written to the run's outputs.

    Raises:
        UserError: as for `run_dataset`.
    """
    dataset = run_dataset(config)
    train, held_out = dataset.split.train, dataset.split.held_out
    warnings = list(dataset.split.notes)
    if config.eval.in_training:
        warnings += notes(choose(held_out, config.eval.tasks), held_out)
    for warning in warnings:
        log.warning("%s", warning)
    save_manifest(dataset, Path(config.run.out))
    return train, held_out
