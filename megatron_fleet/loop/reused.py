"""A run that is already in ``run.out``: where this one goes on, and how they differ, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.checkpoint.checkpoints import RECORDS, Checkpoint, Checkpoints
from megatron_fleet.config.differences import differences
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import read_object
from megatron_fleet.config.schema import Config
from megatron_fleet.config.units import count
from megatron_fleet.telemetry.status import read_status

MOST = 12
"""Differing settings that are named."""
_OF_AN_ATTEMPT = ("run.resume", "run.time_limit_s")


@dataclass(frozen=True, slots=True)
class Held:
    """A run in ``run.out``.

    Attributes:
        checkpoint: that the run goes on from, by the sizes of its files; ``None``: there is none, or none is whole.
        config: resolved configuration, as it was when the checkpoint was written.
    """

    checkpoint: Checkpoint | None
    config: dict[str, Any]


def held_run(config: Config) -> Held | None:
    """Return the run in ``run.out``; ``None``: there is none, or ``run.resume=never`` moves it aside."""
    out = Path(config.run.out)
    checkpoints = Checkpoints(out / "checkpoints", 1)
    if config.run.resume == "never" or not ((out / "metrics.jsonl").is_file() or checkpoints.folders()):
        return None
    committed = checkpoints.committed()
    if isinstance(config.run.resume, int):
        committed = [found for found in committed if found.step == config.run.resume]
    checkpoint = committed[0] if committed else None
    records = out if checkpoint is None else checkpoint.path / RECORDS
    try:
        return Held(checkpoint, read_object((records if (records / "config.json").is_file() else out) / "config.json"))
    except UserError:  # it is replaced at the start
        return Held(checkpoint, {})


def describe(held: Held, config: Config) -> str:
    """Return a sentence: where the run goes on, and the settings that differ, with their old and new values."""
    out = config.run.out
    if held.checkpoint is None:
        whole = not Checkpoints(Path(out, "checkpoints"), 1).folders()
        start = f"{out} has a run without a {'checkpoint; this one starts anew' if whole else 'whole checkpoint'}"
    else:
        start = f"{out} has a run; this one resumes from step {held.checkpoint.step}"
    found = [
        (key, before, now)
        for key, before, now in differences(held.config, config.model_dump(mode="json"))
        if key not in _OF_AN_ATTEMPT and not (config.run.epochs and key in ("run.steps", "run.epochs"))
    ]
    if not held.config or not found:
        return f"mfleet: {start}."
    told = [f"{key} {_value(before)} → {_value(now)}" for key, before, now in found[:MOST]]
    more = [f"{len(found) - MOST} more"] if len(found) > MOST else []
    return f"mfleet: {start}; differs: {', '.join([*told, *more])}."


def finished(held: Held, config: Config) -> str | None:
    """Return a sentence if nothing of the run is left to be done; ``None``: something is, or may be.

    Runs with a store, or with exports beside the training, may have copies or checks left, which only they can tell.
    """
    checkpoint, settings, out = config.checkpoint, config.checkpoint.export, Path(config.run.out)
    if held.checkpoint is None or held.checkpoint.step != config.run.last_step:
        return None
    if checkpoint.store.url is not None or settings.every or settings.best or settings.check:
        return None
    if settings.last and not any((out / "hf" / name).is_file() for name in ("config.json", "adapter_config.json")):
        return None
    try:
        status = read_status(out)
    except UserError:
        return None
    if status is None or status.state != "finished" or status.step != held.checkpoint.step:
        return None
    steps = count(config.run.last_step, "step")
    return f"mfleet: {config.run.out} is finished ({steps}); raise run.steps to train on, or choose another --out."


def _value(value: Any) -> str:
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
