"""Read Fleet task files: every spelling of every field, refused with file, row, field and expectation when wrong."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import megatron_fleet
from megatron_fleet.config.errors import UserError
from megatron_fleet.data.task import Task

EMBEDDED = "embedded"
"""The name, in place of a path, of the embedded fleet's own task file."""

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
}
"""Field of Task → its names in task files. Fields with other names are ignored, as Fleet's exports carry many."""

REQUIRED = frozenset({"key", "prompt", "env_key", "verifier_code"})
MODALITIES = ("tool_use", "computer_use", "browser_use")


def task_path(path: str | Path) -> Path:
    """The file that ``data.tasks`` means: ``embedded``, or a path (``~`` expanded)."""
    if str(path) == EMBEDDED:
        return Path(megatron_fleet.__file__).parent / "envs" / "embedded" / "tasks.json"
    return Path(path).expanduser()


def load_tasks(path: str | Path) -> list[Task]:
    """All tasks of a file, in order: a JSON list, or an object with the list under ``tasks``.

    Raises:
        UserError: unreadable file, bad JSON, or a row that is no task; names row (from 1), field and expectation.
    """
    file = task_path(path)
    tasks: list[Task] = []
    rows_by_key: dict[str, int] = {}
    for number, row in enumerate(_rows(file), start=1):
        task = _task(row, f"{file}: task {number}")
        first = rows_by_key.setdefault(task.key, number)
        if first != number:
            raise UserError(
                f"{file}: task {number}: key {task.key!r} is also the key of task {first}; rename or drop one."
            )
        tasks.append(task)
    return tasks


def content_hash(path: str | Path) -> str:
    """SHA-256 of the file's bytes, hexadecimal: what a run records of its data.

    Raises:
        UserError: the file cannot be read.
    """
    return hashlib.sha256(_read(task_path(path))).hexdigest()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"data.tasks: cannot read {file} ({error.strerror}); give the path of a task file.") from error


def _rows(file: Path) -> list[Any]:
    try:
        content = json.loads(_read(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: line {error.lineno}, column {error.colno}: not JSON ({error.msg}).") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: byte {error.start}: not UTF-8 text; save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not usable JSON ({error}).") from error
    rows = content.get("tasks") if isinstance(content, dict) else content
    if not isinstance(rows, list):
        raise UserError(f'{file}: expected a list of tasks, or an object with such a list under "tasks".')
    if not rows:
        raise UserError(f"{file}: holds no task.")
    return rows


def _task(row: Any, where: str) -> Task:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object, found {_kind(row)}.")
    fields = {field: _value(row, field, names, where) for field, names in ALIASES.items()}
    given = {field: value for field, value in fields.items() if value is not None}
    return Task(**given)


def _value(row: dict[str, Any], field: str, names: tuple[str, ...], where: str) -> Any:
    """The field's checked value, or ``None`` when the row does not give it."""
    found = [(name, row[name]) for name in names if row.get(name) is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise UserError(f"{where}: {found[0][0]} and {name} name the same field but differ; keep one.")
    if not found:
        if field in REQUIRED:
            raise UserError(f"{where}: {names[0]} is missing; every task needs it{_also(names)}.")
        return None
    name, value = found[0]
    expected = _mismatch(field, value)
    if expected is not None:
        raise UserError(f"{where}: {name}: expected {expected}, found {_kind(value)} {_quote(value)}.")
    return value


def _mismatch(field: str, value: Any) -> str | None:
    """What was expected, or ``None`` for a good value."""
    if field == "env_variables":
        return None if isinstance(value, dict) else "an object"
    if field == "difficulty":
        good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 3
        return None if good else "1, 2 or 3"
    if field == "modality":
        return None if value in MODALITIES else "one of " + ", ".join(MODALITIES)
    if not isinstance(value, str):
        return "text"
    return "text that is not empty" if field in REQUIRED and not value.strip() else None


def _also(names: tuple[str, ...]) -> str:
    return f" (also accepted: {', '.join(names[1:])})" if names[1:] else ""


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _quote(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
