"""Load tasks: all rows of a source as ``Task``, or one sentence with file, row, field and expectation."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.data.rows import Parsed, Problem, parse
from megatron_fleet.data.source import read_source
from megatron_fleet.data.task import Task


def load_tasks(address: str | Path) -> list[Task]:
    """All tasks of a file (a path, ``s3://…json``, ``embedded``) or of a prepared folder, in order.

    Raises:
        UserError: it cannot be read, or a row is no task or has another's key; names row (from 1), field, expectation.
    """
    source = read_source(address)
    return checked(parse(source.rows), source.address, keep_first=False).tasks


def checked(parsed: Parsed, address: str, keep_first: bool, excluded: Collection[str] = ()) -> Parsed:
    """``parsed``, when nothing is wrong with it; arguments as of ``faults``.

    Raises:
        UserError: the first problem, and how many more there are.
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
    """The problems that stand in the way.

    Args:
        keep_first: a key that several rows have is no fault.
        excluded: keys of rows that are left out, whatever is wrong with them.
    """
    return [
        problem
        for problem in parsed.problems
        if not (keep_first and problem.kind == "duplicate key") and problem.key not in excluded
    ]
