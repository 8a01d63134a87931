"""Tasks of the embedded fleet: generated, written in Fleet's task format, and played."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.data.task import Task
from megatron_fleet.embedded_fleet import booking, ledger, tickets
from megatron_fleet.embedded_fleet.tasktype import Goal, TaskType
from megatron_fleet.embedded_fleet.verify import run_verifier
from megatron_fleet.embedded_fleet.world import ToolFailure, World
from megatron_fleet.envs.base import Observation, ToolCall, ToolError

WORLDS: dict[str, type[World]] = {w.env_key: w for w in (tickets.Tickets, booking.Booking, ledger.Ledger)}
TYPES: dict[str, tuple[TaskType, ...]] = {
    "tickets": tickets.TYPES,
    "booking": booking.TYPES,
    "ledger": ledger.TYPES,
}
VERSION = "1.0.0"
TODAY = "2026-03-08"
TASKS_PER_WORLD = 4
SHIPPED_SEED, SHIPPED_PER_ENV = 1, 220
SHIPPED_TASKS = Path(__file__).with_name("tasks.json")
"""Task file shipped with the package, and the arguments it was generated with. Another seed gives other worlds, hence
tasks that never overlap with it. After a change of worlds or types: ``write_tasks(SHIPPED_TASKS, generate_rows())``."""

_VERIFIER = '''\
from collections import Counter

COLUMNS = {columns!r}
REMOVED = {removed!r}
ADDED = {added!r}
ANSWER = {answer!r}


def validate_task(env, final_answer=None) -> int:
    """1 if exactly these rows were removed and added, nothing else changed, and the answer is right."""
    seed, current = Counter(), Counter()
    for name, rows in (("seed", seed), ("current", current)):
        for table, columns in COLUMNS.items():
            found = env.db(name).query(f"SELECT {{columns}} FROM {{table}}")
            rows.update((table, *row.values()) for row in found)
    if seed - current != Counter(REMOVED) or current - seed != Counter(ADDED):
        return 0
    if ANSWER is not None and str(final_answer or "").strip(" .\\n").lower() != ANSWER.lower():
        return 0
    return 1
'''


def check_environments(tasks: Iterable[Task], source: str) -> None:
    """Raise UserError if a task belongs to no embedded environment. ``source``: ``data.tasks``."""
    if strange := next((task for task in tasks if task.env_key not in WORLDS), None):
        raise UserError(
            f"data.tasks={source}: task {strange.key}, env_key {strange.env_key}: the embedded fleet has "
            f"{', '.join(sorted(WORLDS))} only; use env.kind=package.module:name for a class of your own, or name a "
            f"server with env=openenv env.url=…"
        )


def generate_rows(seed: int = SHIPPED_SEED, per_env: int = SHIPPED_PER_ENV) -> list[dict[str, Any]]:
    """Generate ``per_env`` tasks per environment as rows of a Fleet task file. Equal arguments give equal rows."""
    return [row for env_key in WORLDS for row in _generate_env(env_key, seed, per_env)]


def generate(seed: int = SHIPPED_SEED, per_env: int = SHIPPED_PER_ENV) -> list[Task]:
    """Return ``generate_rows`` as Tasks, without an intermediate file."""
    return [
        Task(
            key=row["task_key"],
            prompt=row["prompt"],
            env_key=row["env_key"],
            verifier_code=row["verifier_code"],
            env_version=row["env_version"],
            data_key=row["data_key"],
            data_version=row["data_version"],
            env_variables=row["env_variables"],
            modality=row["task_modality"],
            difficulty=row["difficulty"],
        )
        for row in generate_rows(seed, per_env)
    ]


def write_tasks(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a Fleet task file, one task per line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"tasks": [\n{lines}\n]}}\n', encoding="utf-8")


def make_world(env_key: str, data_key: str, env_variables: dict[str, Any]) -> World:
    """Create a new instance. Raises KeyError for an unknown ``env_key``."""
    return WORLDS[env_key](data_key, env_variables)


def _generate_env(env_key: str, seed: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{env_key}/{seed}")
    rows: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    turn = 0
    while len(rows) < count:
        kind = TYPES[env_key][turn % len(TYPES[env_key])]
        data_key = f"{env_key}-{seed}-{turn // TASKS_PER_WORLD:04d}"
        row = _make_task(env_key, kind, data_key, rng)
        turn += 1
        if row is None or (row["prompt"], data_key) in seen:
            continue
        seen.add((row["prompt"], data_key))
        rows.append({"task_key": f"{env_key}-{kind.name}-{seed}-{len(rows):04d}", **row})
    return rows


def _make_task(env_key: str, kind: TaskType, data_key: str, rng: random.Random) -> dict[str, Any] | None:
    world_type = WORLDS[env_key]
    user = world_type(data_key, {}).residents[0]
    variables = {"CURRENT_DATE": TODAY, "LOGGED_IN_USER": user}
    world = world_type(data_key, variables)
    goal = Goal(world)
    fields = kind.make(world, rng, goal)
    if fields is None:
        return None
    return {
        "prompt": rng.choice(kind.phrasings).format(**fields),
        "env_key": env_key,
        "env_version": VERSION,
        "data_key": data_key,
        "data_version": VERSION,
        "env_variables": variables,
        "verifier_code": _VERIFIER.format(
            columns=world.columns, removed=goal.removed, added=goal.added, answer=goal.answer
        ),
        "task_modality": "tool_use",
        "difficulty": kind.difficulty,
    }


def openai_tool(spec: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool specification to OpenAI function format."""
    return {"type": "function", "function": spec}


class EmbeddedSession:
    """A world playing one task.

    Raises:
        KeyError: the task belongs to no embedded environment.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.world = make_world(task.env_key, task.data_key or "default", task.env_variables)

    def tools(self) -> tuple[dict[str, Any], ...]:
        """Return the tools in OpenAI function format."""
        return tuple(openai_tool(spec) for spec in self.world.tools())

    def call(self, call: ToolCall) -> Observation:
        """Call one tool; a failing tool is an Observation with ``error``."""
        try:
            return Observation(self.world.call(call.name, call.arguments))
        except ToolFailure as failure:
            return Observation("", error=ToolError(failure.kind, str(failure)))
        except (sqlite3.Error, UnicodeError, OverflowError) as error:
            # Values that no database takes, such as a lone surrogate.
            return Observation("", error=ToolError("invalid_args", type(error).__name__))

    def verify(self, final_answer: str | None) -> float:
        """Run the verifier in this process: only for tasks generated by this package. Raises what it raises."""
        return run_verifier(self.task.verifier_code, self.world.seed, self.world.current(), final_answer, None)

    def close(self) -> None:
        self.world.close()
