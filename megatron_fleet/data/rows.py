"""Rows of a task file as ``Task``: every spelling of a field is accepted, all problems of each row are reported."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import environment_name
from megatron_fleet.data.task import Task

ALIASES: dict[str, tuple[str, ...]] = {
    "key": ("task_key", "key"),
    "prompt": ("prompt",),
    "env_key": ("env_key", "env_id"),
    "env_version": ("env_version", "version"),
    "data_key": ("data_key", "data_id", "env_data_key"),
    "data_version": ("data_version", "env_data_version"),
    "env_variables": ("env_variables",),
    "verifier_code": ("verifier_code", "verifier_func"),
    "modality": ("task_modality",),
    "difficulty": ("difficulty",),
    "answer": ("answer",),
}
"""Field of ``Task`` → its names in task files. Other fields, of which Fleet's exports have many, are ignored."""

KNOWN = frozenset(name for names in ALIASES.values() for name in names)
REQUIRED = frozenset({"key", "prompt", "env_key"})
OPTIONAL_TEXT = frozenset({"env_version", "data_key", "data_version", "verifier_code"})
"""Fields in which `NO_TEXT` means the default, like a missing value."""
NO_TEXT = ("", "None")
"""Exports write Python's None as text."""
JSON_TEXT = frozenset({"env_variables", "difficulty"})
"""Fields that are not text, which tables hold as JSON text."""
ALL_ENVIRONMENTS = "all"
RESERVED = {
    ALL_ENVIRONMENTS: "means all environments together",
    "aggregated_results": "is the name of a file of every evaluation",
}
"""Reserved environment names → reason."""
MAX_CHARS = {"env_key": 60, "key": 1000, "env_version": 1000, "data_key": 1000, "data_version": 1000}
"""Maximum length of naming fields. An environment's name becomes part of a file name of at most 255 bytes."""
MAX_ROWS = 5
"""Maximum number of rows named for problems of one kind."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MODALITIES = ("tool_use", "computer_use", "browser_use")

Kind = Literal["not an object", "missing", "wrong value", "conflict", "duplicate key"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of one row.

    Attributes:
        row: number in the file, from 1.
        key: the row's key, if it has one.
        field: name in the file; empty if the problem concerns the whole row.
        expected, found: descriptions in words.
    """

    row: int
    key: str | None
    field: str
    kind: Kind
    expected: str
    found: str

    def __str__(self) -> str:
        key = f" ({_quote(self.key)[1:-1]})" if self.key is not None else ""
        field = f" {self.field}:" if self.field else ""
        return f"task {self.row}{key}:{field} expected {self.expected}, found {self.found}."


@dataclass(frozen=True, slots=True)
class Parsed:
    """Result of parsing the rows of a file, in file order.

    Attributes:
        tasks: valid rows, without repeated keys (the first row counts).
        repeated: valid rows whose key an earlier row has.
        problems: problems of all rows, including those of ``repeated``.
    """

    tasks: list[Task]
    repeated: list[Task]
    problems: list[Problem]


def parse(rows: Sequence[Any]) -> Parsed:
    """Parse every row; invalid rows do not raise."""
    parsed = Parsed([], [], [])
    first: dict[str, int] = {}
    environments: dict[str, str] = {}
    for number, row in enumerate(rows, start=1):
        task, problems = parse_row(row, number)
        parsed.problems.extend(problems)
        if task is None:
            continue
        namesake = environments.setdefault(environment_name(task.env_key), task.env_key)
        if namesake != task.env_key:
            expected = (
                f"{_quote(namesake)} or another name, as metrics and files call both {environment_name(namesake)}"
            )
            parsed.problems.append(
                Problem(number, task.key, ALIASES["env_key"][0], "conflict", expected, _quote(task.env_key))
            )
            continue
        earlier = first.setdefault(task.key, number)
        if earlier == number:
            parsed.tasks.append(task)
            continue
        parsed.repeated.append(task)
        expected = "a key of its own (data.duplicates=first keeps the first of them)"
        name = ALIASES["key"][0]
        parsed.problems.append(
            Problem(number, task.key, name, "duplicate key", expected, f"{task.key!r}, the key of task {earlier}")
        )
    return parsed


def parse_row(row: Any, number: int) -> tuple[Task | None, list[Problem]]:
    """Return the task of one row, or ``None`` and all its problems. ``number`` counts from 1."""
    if not isinstance(row, dict):
        return None, [Problem(number, None, "", "not an object", "an object", _kind(row))]
    key = next((row[name] for name in ALIASES["key"] if isinstance(row.get(name), str)), None)
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    found_by_field = {
        field: [(name, value) for name in names if (value := _normal(field, row.get(name))) is not None]
        for field, names in ALIASES.items()
    }
    found_by_field["env_key"], versions = _without_versions(found_by_field["env_key"])
    found_by_field["env_version"] = versions + found_by_field["env_version"]
    for field, found in found_by_field.items():
        if field in OPTIONAL_TEXT:
            found = [(name, value) for name, value in found if value not in NO_TEXT]
        wrong = _fault(field, found)
        if wrong is not None:
            name, kind, expected, what = wrong
            problems.append(Problem(number, key, name, kind, expected, what))
        elif found:
            given[field] = found[0][1]
    return (None if problems else Task(**given)), problems


def _normal(field: str, value: Any) -> Any:
    """Return what a field means in the forms of other writers: JSON text, a prompt as one message, 2.0 for 2."""
    if field in JSON_TEXT and isinstance(value, str):
        if value in NO_TEXT:
            return None
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    if field == "prompt" and isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        message = value[0]
        return message.get("content") if message.get("role") == "user" else value
    if field == "difficulty" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _without_versions(found: Sequence[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """Return the names of an environment, and the versions that Fleet's exports append to them: ``name:version``."""
    names, versions = [], []
    for field, value in found:
        if isinstance(value, str):
            value, _, version = value.partition(":")
            versions.append((f"{field} after the colon", version))
        names.append((field, value))
    return names, versions


def _fault(field: str, found: Sequence[tuple[str, Any]]) -> tuple[str, Kind, str, str] | None:
    """Return name, kind, expected and found of a field's problem. ``found``: its names in the row and their values."""
    first, *others = ALIASES[field]
    if not found:
        also = f" (also accepted: {', '.join(others)})" if others else ""
        return (first, "missing", f"text{also}", "nothing, it is missing") if field in REQUIRED else None
    name, value = found[0]
    for other, its_value in found[1:]:
        if its_value != value:
            expected = f"the value of {name}, {_quote(value)}, as both name one field"
            return other, "conflict", expected, f"{_kind(its_value)} {_quote(its_value)}"
    expected_value = _mismatch(field, value)
    if expected_value is None:
        return None
    return name, "wrong value", expected_value, f"{_kind(value)} {_quote(value)}"


def _mismatch(field: str, value: Any) -> str | None:
    """Return a description of the expected value, or ``None`` if ``value`` is valid."""
    if field == "answer":
        return None
    if field == "env_variables":
        return None if isinstance(value, dict) else "an object, or its JSON text"
    if field == "difficulty":
        good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 3
        return None if good else "1, 2 or 3"
    if field == "modality":
        return None if value in MODALITIES else "one of " + ", ".join(MODALITIES)
    if not isinstance(value, str):
        return "text, or a list of one message of the user" if field == "prompt" else "text"
    if field == "env_version" and ":" in value:
        return "a version without a colon"
    limit = MAX_CHARS.get(field)
    if limit is not None and (len(value) > limit or _CONTROL.search(value)):
        return f"text of at most {limit} characters without control characters"
    if field == "env_key" and value in RESERVED:
        return f"another name, as {value} {RESERVED[value]}"
    if field == "env_key" and value and not value.strip("."):
        return "a name that is not only dots, as it is part of the names of metrics and files"
    return "text that is not empty" if field in REQUIRED and not value.strip() else None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _quote(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def checked(parsed: Parsed, address: str, keep_first: bool, excluded: Collection[str] = ()) -> Parsed:
    """Return ``parsed`` if it has no problems; arguments as for ``faults``.

    Raises:
        UserError: the first problem, the other rows that have it, and the number of other kinds.
    """
    problems = faults(parsed, keep_first, excluded)
    if not problems:
        return parsed
    alike, *others = by_kind(problems)
    count = "is 1 more kind of problem" if len(others) == 1 else f"are {len(others)} more kinds of problems"
    more = f" There {count}; list all with `mfleet data inspect {address}`." if others else ""
    raise UserError(f"{address}: {described(alike)}{_advice(alike[0])}{more}")


def _advice(problem: Problem) -> str:
    if problem.kind == "missing" and problem.field in (ALIASES["key"][0], ALIASES["env_key"][0]):
        return " `mfleet data from FILE` makes them."
    return " Correct it, or name it in a list of data.exclusions." if problem.key is not None else ""


def by_kind(problems: Sequence[Problem]) -> list[list[Problem]]:
    """Group problems of the same field that expect the same, in the order of the first of each."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.field, problem.kind, problem.expected), []).append(problem)
    return list(groups.values())


def described(alike: Sequence[Problem]) -> str:
    """Return one sentence for problems that `by_kind` put together, and one with the rows of the others."""
    first, *others = alike
    rows = ", ".join(str(problem.row) for problem in others[:MAX_ROWS])
    rows += ", …" if len(others) > MAX_ROWS else ""
    tasks = "1 more task" if len(others) == 1 else f"{len(others)} more tasks"
    return f"{first} The same in {tasks}: {rows}." if others else str(first)


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
