"""Seconds of a step in other modes: what a run would gain by not waiting for the last episode of each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fleet.config.schema import Config
from megatron_fleet.models.model import Model
from megatron_fleet.planning.hardware import Gpu
from megatron_fleet.planning.step import step_time
from megatron_fleet.planning.workload import Workload

MODES: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("every batch waits for its last episode", {"max_staleness": 0}, {"ahead": None, "window": 1}),
    ("the first to end of a quarter more, the others played again", {"max_staleness": 0, "unfinished": "again"},
     {"ahead": 0.25, "window": None}),
    ("unfinished episodes go on, a step ahead", {"max_staleness": 1, "unfinished": "continue"},
     {"ahead": None, "window": 1}),
    ("unfinished episodes go on, two steps ahead", {"max_staleness": 2, "unfinished": "continue"},
     {"ahead": None, "window": 1}),
    ("unfinished episodes go on, and a batch takes what ends first", {"max_staleness": 2, "unfinished": "continue"},
     {"ahead": 0.5, "window": None}),
)  # fmt: skip
"""Description, keys of ``rollout``, keys of ``rollout.batch``."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of a configuration.

    Attributes:
        overrides: the keys that choose it, as on the command line; none: the configuration has it.
        seconds: of a step.
        stale: it trains on tokens of earlier weights.
    """

    description: str
    overrides: str
    seconds: float
    stale: bool


def modes(config: Config, hf_config: Mapping[str, Any], model: Model, gpu: Gpu, load: Workload) -> list[Mode]:
    """Return the modes that a configuration may have, with their seconds of a step."""
    found = []
    for description, keys, batch in MODES:
        rollout = config.rollout.model_copy(update={**keys, "batch": config.rollout.batch.model_copy(update=batch)})
        changed = config.model_copy(update={"rollout": rollout})
        seconds = step_time(changed, hf_config, model, gpu, load).total
        names = {f"rollout.{key}": value for key, value in keys.items() if value != getattr(config.rollout, key)}
        now = config.rollout.batch
        names |= {f"rollout.batch.{key}": value for key, value in batch.items() if value != getattr(now, key)}
        overrides = " ".join(f"{name}={'null' if value is None else value}" for name, value in names.items())
        found.append(Mode(description, overrides, seconds, rollout.max_staleness > 0))
    return found


def describe_modes(found: Sequence[Mode]) -> list[str]:
    """Return a line for each mode, the fastest first, and one that says which to take."""
    ordered = sorted(found, key=lambda mode: mode.seconds)
    rows = [f"{mode.seconds:8.1f}   {mode.description}: {mode.overrides or 'as configured'}" for mode in ordered]
    fresh, best = next(mode for mode in ordered if not mode.stale), ordered[0]
    rows.append(f"best without tokens of earlier weights: {fresh.description}")
    if best.stale:
        need = "algorithm=importance_weighted, or an algorithm.correction.kind"
        rows.append(f"best with them: {best.description}; needs {need} (docs/run/modes.md)")
    return rows
