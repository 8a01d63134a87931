"""Task selection: filters by modality, environment and difficulty, exclusion lists, a maximum number."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.files import parse_yaml, read_file, user_path
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data.task import Task

Keeps = Callable[[Task], bool]
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Selection:
    """Tasks that are kept, in file order, and those that are removed, each with a short reason."""

    kept: list[Task]
    removed: list[tuple[Task, str]]


def select(tasks: Sequence[Task], data: DataConfig) -> Selection:
    """Apply the filters in order; the first one that removes a task gives the reason. ``max_tasks`` comes last.

    Raises:
        UserError: ``data.environments`` names one without tasks, or ``data.held_out_environments`` only such ones; or
            an exclusion list cannot be read.
    """
    _check_environments(tasks, data)
    kept: list[Task] = []
    removed: list[tuple[Task, str]] = []
    filters = _filters(data)
    for task in tasks:
        reason = next((reason for reason, keeps in filters if not keeps(task)), None)
        if reason is None:
            kept.append(task)
        else:
            removed.append((task, reason))
    if data.max_tasks is None:
        return Selection(kept, removed)
    chosen = choose(kept, data.max_tasks)
    removed += [(task, "max_tasks") for task in kept if task.key not in chosen]
    return Selection([task for task in kept if task.key in chosen], removed)


def excluded_tasks(data: DataConfig) -> frozenset[str]:
    """Return the keys of single tasks on the exclusion lists. Raises UserError if a list cannot be read."""
    return frozenset().union(*(read_exclusion(name).tasks for name in data.exclusions))


def choose(tasks: Sequence[Task], most: int) -> set[str]:
    """Return the keys of at most ``most`` tasks, environments in proportion; a larger ``most`` gives a superset.

    Sainte-Laguë's method: the tasks of each environment are sorted by a hash, the i-th (from 0) of n has rank
    (i + 1/2) / n, and the first ``most`` over all environments are taken. The hash differs from that of the split,
    whose smallest values are the evaluation tasks.
    """
    by_env: defaultdict[str, list[str]] = defaultdict(list)
    for task in tasks:
        by_env[task.env_key].append(task.key)
    places = [
        ((place + 0.5) / len(keys), env_key, key)
        for env_key, keys in by_env.items()
        for place, key in enumerate(sorted(keys, key=_digest))
    ]
    return {key for _, _, key in sorted(places)[:most]}


def _filters(data: DataConfig) -> list[tuple[str, Keeps]]:
    filters: list[tuple[str, Keeps]] = []
    if data.modality != "all":
        filters.append(("modality", lambda task: task.modality == data.modality))
    if data.environments:
        filters.append(("environment", lambda task: task.env_key in data.environments))
    if data.difficulties:
        filters.append(("difficulty", lambda task: task.difficulty in data.difficulties))
    return filters + [(one.name, _outside(one)) for one in map(read_exclusion, data.exclusions)]


def _outside(exclusion: Exclusion) -> Keeps:
    return lambda task: not exclusion.covers(task)


def _check_environments(tasks: Sequence[Task], data: DataConfig) -> None:
    present = {task.env_key for task in tasks}
    named = {"data.environments": data.environments, "data.held_out_environments": data.held_out_environments}
    for key, environments in named.items():
        absent = sorted(set(environments) - present)
        # A preset may hold out environments of several modalities, not all of which are in one file.
        if absent and not (key == "data.held_out_environments" and present.intersection(environments)):
            raise UserError(
                f"{key} names {absent[0]}, which no task of data.tasks={data.tasks} has; they have "
                f"{', '.join(sorted(present))}. Correct or remove it."
            )


def _digest(key: str) -> bytes:
    return hashlib.md5(f"max_tasks {key}".encode(), usedforsecurity=False).digest()


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
    shipped = Path(__file__).parent / "exclusions"
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
        raise UserError(
            f"{name}: {unknown[0]} is not a key of an exclusion list; write reason, environments and tasks."
        )
    lists = {field: content.get(field) or [] for field in ("environments", "tasks")}
    for field, values in lists.items():
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise UserError(f"{name}: {field} must be a list of texts.")
    if not any(lists.values()):
        raise UserError(f"{name} names neither environments nor tasks, so it excludes nothing; add some.")
    return Exclusion(short, content["reason"], frozenset(lists["environments"]), frozenset(lists["tasks"]))
