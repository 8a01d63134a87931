"""Exclusion lists: tasks to leave out, with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_yaml, read_file, user_path
from megatron_fleet.data import exclusions
from megatron_fleet.data.task import Task

SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Exclusion:
    """One list: whole environments and single tasks, by key."""

    name: str
    reason: str
    environments: frozenset[str]
    tasks: frozenset[str]

    def covers(self, task: Task) -> bool:
        return task.env_key in self.environments or task.key in self.tasks


def read_exclusion(name: str) -> Exclusion:
    """Read one of the package's exclusion lists, or a user's file (YAML or JSON).

    Raises:
        UserError: there is no such list, or it is malformed.
    """
    shipped = Path(exclusions.__file__).parent
    file = user_path(name) if name.endswith(SUFFIXES) else shipped / f"{name}.yaml"
    known = ", ".join(sorted(path.stem for path in shipped.glob("*.yaml")))
    remedy = f"data.exclusions names one of {known}, or a file of yours that ends with .yaml or .json"
    return _exclusion(Path(name).stem, _mapping(parse_yaml(read_file(file, remedy), name), name), name)


def _mapping(content: Any, name: str) -> dict[str, Any]:
    if not isinstance(content, dict) or not isinstance(content.get("reason"), str):
        raise UserError(f"{name}: an exclusion list needs `reason: text`, and `environments` or `tasks`.")
    return content


def _exclusion(short: str, content: dict[str, Any], name: str) -> Exclusion:
    unknown = sorted(set(content) - {"reason", "environments", "tasks"})
    if unknown:
        raise UserError(f"{name}: {unknown[0]} means nothing here; write reason, environments and tasks.")
    lists = {field: content.get(field) or [] for field in ("environments", "tasks")}
    for field, values in lists.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise UserError(f"{name}: {field} must be a list of texts.")
    if not any(lists.values()):
        raise UserError(f"{name}: names neither environments nor tasks, so it excludes nothing; add some.")
    return Exclusion(short, content["reason"], frozenset(lists["environments"]), frozenset(lists["tasks"]))
