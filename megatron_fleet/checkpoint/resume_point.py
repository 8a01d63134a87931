"""Where a run starts from: its newest good checkpoint, or nothing, with an earlier run's records moved aside."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from megatron_fleet.checkpoint.checkpoints import RECORDS, Checkpoint, Checkpoints, kept_besides
from megatron_fleet.checkpoint.manifest import DamagedCheckpoint
from megatron_fleet.checkpoint.store import RunStore, Uploader, run_url
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config, EvalConfig
from megatron_fleet.data.split import MANIFEST as SPLIT
from megatron_fleet.storage.local import write_atomically
from megatron_fleet.storage.run_folder import RunFolder
from megatron_fleet.telemetry.sinks import read_metrics
from megatron_fleet.telemetry.slack import THREAD

log = logging.getLogger(__name__)

_RECORDS = ("checkpoints", "metrics.jsonl")
"""Outputs of a run that reached its first step or checkpoint; starting from scratch would replace them."""


@contextmanager
def open_checkpoints(config: Config) -> Iterator[tuple[Checkpoints, Uploader | None, Checkpoint | None]]:
    """Checkpoints of a run, what copies them to the store if there is one, and the one to resume from, see
    `find_start`. At the end of the block unfinished uploads are waited for.

    Raises:
        UserError: as for `find_start`, before any record is changed.
    """
    out, settings = Path(config.run.out), config.checkpoint
    store = None if settings.store.url is None else _open_store(config, settings.store.url)

    def kept(steps: Sequence[int]) -> set[int]:
        scores = _scores(out, settings.keep_best)
        unscored = _awaited(steps, scores, config.eval) if settings.keep_best else set()
        return kept_besides(steps, settings.keep_every, scores) | unscored

    def kept_here(steps: Sequence[int]) -> set[int]:
        return kept(steps) | (set() if uploader is None else uploader.waiting())

    def kept_there(steps: Sequence[int]) -> set[int]:
        return kept(steps) | set(steps[: settings.store.keep])

    uploader: Uploader | None = None
    records = [out / name for name in ("metrics.jsonl", "config.json", SPLIT, THREAD)]
    checkpoints = Checkpoints(out / "checkpoints", settings.keep, kept_here, records)
    found = find_start(config, checkpoints, store)
    if store is None:
        yield checkpoints, None, found
        return
    store.begin_attempt()
    uploader = Uploader(store, kept_there)
    try:
        newest = max(store.steps(), default=0)
        for checkpoint in reversed(checkpoints.committed()):
            if checkpoint.step > newest:  # an earlier attempt ended before it was there
                uploader.add(checkpoint)
        yield checkpoints, uploader, found
    finally:
        uploader.close(settings.store.drain_timeout_s)


def _scores(out: Path, metric: str | None) -> dict[int, float]:
    """Recorded values of a metric by step."""
    rows = [] if metric is None else read_metrics(out / "metrics.jsonl")
    return {row["step"]: row[str(metric)] for row in rows if row.get(str(metric)) is not None}


def _awaited(steps: Sequence[int], scores: Mapping[int, float], evaluates: EvalConfig) -> set[int]:
    """Return those of ``steps`` whose evaluation may still be under way: evaluation engines play for some steps, and
    by then a checkpoint that turns out to be the best would be removed. They make one evaluation after the other.
    """
    if not evaluates.engines or not evaluates.interval:
        return set()
    newest = max(scores, default=-1)
    return {step for step in steps if step > newest and step % evaluates.interval == 0}


def _open_store(config: Config, url: str) -> RunStore:
    assert config.run.id is not None  # `loop.main` has read it from the folder
    limit = config.checkpoint.store.mb_per_s
    address = run_url(url, config.run.project, config.model.path, config.run.id)
    return RunStore(address, None if limit is None else limit * 1e6)


def find_start(config: Config, checkpoints: Checkpoints, store: RunStore | None = None) -> Checkpoint | None:
    """Find the checkpoint to resume from, in ``run.out`` or the store, from which it is copied to ``run.out``.

    Returns:
        ``None``: start from scratch.

    Raises:
        UserError: what ``run.resume`` asks for is not there, all checkpoints are damaged, the store refuses, or the
            checkpoint is beyond the last step.
    """
    if config.run.resume == "never":
        if store is not None and store.steps():
            raise UserError(
                f"run.resume=never: {store.url} has checkpoints of an earlier run; choose another run.id, or resume it."
            )
        return None
    found: Checkpoint | None
    if isinstance(config.run.resume, int):
        found = _of_step(config, checkpoints, store, config.run.resume)
    else:
        found = newest_of(checkpoints, store)
    if found is None and config.run.resume == "must":
        places = " and ".join([config.run.out, *([store.url] if store else [])])
        raise UserError(f"run.resume=must: there is no checkpoint in {places}; correct run.out or run.id.")
    if found is not None and found.step > config.run.last_step:
        raise UserError(
            f"run.steps={config.run.last_step} is below step {found.step} of {found.path}; raise it or choose another "
            f"run.out."
        )
    if found is not None:
        _restore_records(found, Path(config.run.out))
    return found


def newest_of(checkpoints: Checkpoints, store: RunStore | None) -> Checkpoint | None:
    """Newest good checkpoint of both places, copied here if it is in the store. Errors are those of `find_start`."""
    problem, here = None, None
    try:
        here = checkpoints.newest()
    except UserError as error:
        problem = error
    if store is None:
        if problem is not None:
            raise problem
        return here
    for step in store.steps():
        if here is not None and step <= here.step:
            break
        try:
            return _download(store, checkpoints, step)
        except DamagedCheckpoint as error:
            log.warning("skipping a damaged checkpoint: %s", error)
            problem = problem or error
    if here is None and problem is not None:
        raise problem
    return here


def _of_step(config: Config, checkpoints: Checkpoints, store: RunStore | None, step: int) -> Checkpoint:
    found = checkpoints.of_step(step)
    if found is None and store is not None and step in store.steps():
        found = _download(store, checkpoints, step)
    if found is None:
        places = " and ".join([config.run.out, *([store.url] if store else [])])
        raise UserError(f"run.resume={step}: there is no checkpoint of this step in {places}; choose another step.")
    checkpoints.set_later_aside(step)
    if store is not None:
        store.set_later_aside(step)
    return found


def _download(store: RunStore, checkpoints: Checkpoints, step: int) -> Checkpoint:
    final = checkpoints.path_of(step)
    store.download(step, final, threading.Event())
    return Checkpoint(final, step)


def _restore_records(found: Checkpoint, out: Path) -> None:
    """Copy records from a checkpoint where the run's folder has none, because it is on a new machine."""
    for record in (found.path / RECORDS).glob("*"):
        if not (out / record.name).exists():
            write_atomically(out / record.name, record.read_bytes())


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
            f"run.out={config.run.out}: run.resume=never has to rename this folder to {aside}, which failed "
            f"({error.strerror}); choose another run.out."
        ) from None
    log.warning("run.resume=never: what an earlier run left in %s is now in %s", config.run.out, aside)


def _paths(values: Any) -> Iterator[str]:
    """Yield every string in ``values`` that is an existing path."""
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _paths(value)
    elif isinstance(values, str) and values and os.path.exists(values):
        yield values
