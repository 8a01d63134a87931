"""Seconds of a step in other modes: what a run would gain by not waiting for the last episode of each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fleet.config.schema import RolloutConfig

MODES: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
    ("wait for every episode of a batch", {"max_staleness": 0}, {"ahead": None, "window": 1}),
    ("over-sample by a quarter, restart the unfinished groups", {"max_staleness": 0, "unfinished": "again"},
     {"ahead": 0.25, "window": None}),
    ("continue unfinished episodes, one step ahead", {"max_staleness": 1, "unfinished": "continue"},
     {"ahead": None, "window": 1}),
    ("continue unfinished episodes, two steps ahead", {"max_staleness": 2, "unfinished": "continue"},
     {"ahead": None, "window": 1}),
    ("continue unfinished episodes, train on the first to finish", {"max_staleness": 2, "unfinished": "continue"},
     {"ahead": None, "window": None}),
)  # fmt: skip
"""Description, keys of ``rollout``, keys of ``rollout.batch``."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode of a configuration.

    Attributes:
        overrides: the keys that choose it, as on the command line; none: the configuration has it.
        seconds: of a step.
        stale: it trains on tokens sampled with earlier weights.
    """

    description: str
    overrides: str
    seconds: float
    stale: bool


def modes(rollout: RolloutConfig, step_s: Callable[[RolloutConfig], float]) -> list[Mode]:
    """Return the modes that a configuration may have. ``step_s``: seconds of a step with a changed section."""
    found = []
    for description, keys, batch in MODES:
        changed = rollout.model_copy(update={**keys, "batch": rollout.batch.model_copy(update=batch)})
        names = {f"rollout.{key}": value for key, value in keys.items() if value != getattr(rollout, key)}
        now = rollout.batch
        names |= {f"rollout.batch.{key}": value for key, value in batch.items() if value != getattr(now, key)}
        overrides = " ".join(f"{name}={'null' if value is None else value}" for name, value in names.items())
        found.append(Mode(description, overrides, step_s(changed), changed.max_staleness > 0))
    return found


def describe_modes(found: Sequence[Mode]) -> list[str]:
    """Return a line for each mode, the fastest first, and one that says which to take."""
    ordered = sorted(found, key=lambda mode: mode.seconds)
    rows = [f"{mode.seconds:8.1f}   {mode.description}: {mode.overrides or 'as configured'}" for mode in ordered]
    fresh, best = next(mode for mode in ordered if not mode.stale), ordered[0]
    rows.append(f"fastest on-policy mode: {fresh.description}")
    if best.stale:
        need = "algorithm=importance_weighted, or an algorithm.correction.kind"
        rows.append(f"fastest mode with stale tokens: {best.description}; requires {need} (docs/run/modes.md)")
    return rows
