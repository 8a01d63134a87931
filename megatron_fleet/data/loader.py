"""Load tasks: all rows of a source as ``Task``, or one error message with file, row, field and expectation."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.data.rows import Parsed, Problem, parse
from megatron_fleet.data.source import read_source
from megatron_fleet.data.task import Task


def load_tasks(address: str | Path) -> list[Task]:
    """Load all tasks of a file (a path, ``s3://…json``, ``embedded``) or of a prepared folder, in order.

    Raises:
        UserError: it cannot be read, or a row is invalid or a duplicate; names row (from 1), field, expectation.
    """
    source = read_source(address)
    return checked(parse(source.rows), source.address, keep_first=False).tasks


def checked(parsed: Parsed, address: str, keep_first: bool, excluded: Collection[str] = ()) -> Parsed:
    """Return ``parsed`` if it has no problems; arguments as for ``faults``.

    Raises:
        UserError: the first problem, and the number of others.
    """
    problems = faults(parsed, keep_first, excluded)
    if not problems:
        return parsed
    first, others = problems[0], len(problems) - 1
    advice = " Correct it, or name it in a list of data.exclusions." if first.key is not None else ""
    count = "is 1 more problem" if others == 1 else f"are {others} more problems"
    more = f" There {count}; list all with `mfleet data inspect {address}`." if others else ""
    raise UserError(f"{address}: {first}{advice}{more}")


def faults(parsed: Parsed, keep_first: bool, excluded: Collection[str]) -> list[Problem]:
    """Return the problems that prevent using ``parsed``.

    Args:
        keep_first: ignore duplicate keys.
        excluded: keys of rows that are left out, whose problems do not matter.
    """
    return [
        problem
        for problem in parsed.problems
        if not (keep_first and problem.kind == "duplicate key") and problem.key not in excluded
    ]
