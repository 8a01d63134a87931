"""Overrides of a sweep, in the syntax of Hydra's own sweeper: ``key=a,b``, ``key=choice(a,b)``, ``key=range(1,4)``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_fleet.config.errors import UserError

MAX_RUNS = 1000
"""A longer sweep is a mistake, such as an unquoted comma."""


def sweep(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run: every combination of the values, those of the last key varying fastest.

    Raises:
        UserError: nothing is varied, there are too many runs, or a sweep is not of separate values.
    """
    choices = [_choices(text) for text in overrides]
    count = 1
    for values in choices:
        count *= len(values)
    if count < 2:
        raise UserError("--multirun: no override has several values; write them with commas, as run.seed=1,2,3.")
    if count > MAX_RUNS:
        raise UserError(f"--multirun: {count} runs are more than {MAX_RUNS}; quote a comma that is part of a value.")
    return [list(combination) for combination in itertools.product(*choices)]


def _choices(text: str) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError):
        return [text]  # a literal text; the schema judges it
    if not parsed.is_sweep_override():
        return [text]
    if not parsed.is_discrete_sweep():
        raise UserError(f"--multirun: {text} names no separate values; write them with commas, or as range(1,4).")
    key = parsed.get_key_element()
    return [f"{key}={value}" for value in parsed.sweep_string_iterator()]
