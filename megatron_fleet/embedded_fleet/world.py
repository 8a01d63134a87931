"""Base class of the embedded environments: tools over an in-memory SQLite database."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from jsonschema import Draft202012Validator

PEOPLE = (
    "Ana", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ivy", "Jack", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Yara", "Zoe",
)  # fmt: skip
"""All names of people, shared by all worlds so that each is frequent enough to be one token of a small vocabulary."""

TEXT: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}


def one_of(*values: str) -> dict[str, Any]:
    """Return the JSON schema of a string with a fixed set of values."""
    return {"type": "string", "enum": list(values)}


class ToolFailure(Exception):
    """A failed tool call. ``kind`` is one of the kinds of ``megatron_fleet.envs.base.ToolError``."""

    def __init__(self, message: str, kind: str = "execution_error") -> None:
        super().__init__(message)
        self.kind = kind


def tool(description: str, **parameters: dict[str, Any]) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Mark a method as a tool. ``parameters`` are JSON schemas; all are required."""

    def mark(method: Callable[..., str]) -> Callable[..., str]:
        schema = {"type": "object", "properties": parameters, "required": list(parameters)}
        method.tool_spec = {"name": method.__name__, "description": description, "parameters": schema}  # type: ignore[attr-defined]
        return method

    return mark


class World:
    """Base of the three environments.

    Subclasses set ``env_key``, ``schema`` (SQL) and ``columns`` (table → columns that a verifier compares, without
    generated ids), implement ``populate`` and mark their tools with ``tool``.

    Attributes:
        db: the database; ``seed`` is its serialised content before the first call.
        variables: the task's ``env_variables``.
        residents: the people of this world, in an order fixed by ``data_key``.
    """

    env_key: ClassVar[str]
    schema: ClassVar[str]
    columns: ClassVar[dict[str, str]]
    _tools: ClassVar[dict[str, tuple[dict[str, Any], Draft202012Validator]]]

    def __init_subclass__(cls) -> None:
        specs = [m.tool_spec for m in vars(cls).values() if hasattr(m, "tool_spec")]
        cls._tools = {s["name"]: (s, Draft202012Validator(s["parameters"])) for s in specs}

    def __init__(self, data_key: str, variables: dict[str, Any]) -> None:
        # A session is used by one thread at a time, but not always by the one that created it.
        self.db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self.variables = variables
        # Small pages keep the serialised database at a few kilobytes.
        self.db.executescript(f"PRAGMA page_size=512; BEGIN; {self.schema}")
        self.residents = self.populate(random.Random(f"{self.env_key}/{data_key}"))
        self.db.execute("COMMIT")
        self.seed = self.db.serialize()

    def populate(self, rng: random.Random) -> list[str]:
        """Fill the tables; return the residents."""
        raise NotImplementedError

    @classmethod
    def tools(cls) -> list[dict[str, Any]]:
        """Return the tools as ``{"name", "description", "parameters"}``."""
        return [spec for spec, _ in cls._tools.values()]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call one tool.

        Raises:
            ToolFailure: unknown tool, arguments that do not match the schema, or a refusal by the tool itself.
        """
        entry = self._tools.get(name)
        if entry is None:
            raise ToolFailure(f"no tool {name}", "tool_not_found")
        spec, validator = entry
        unknown = arguments.keys() - spec["parameters"]["properties"].keys()
        if unknown:
            raise ToolFailure(f"unknown argument {min(unknown)}", "invalid_args")
        problem = next(validator.iter_errors(arguments), None)
        if problem is not None:
            raise ToolFailure(_short(problem.message), "invalid_args")
        return getattr(self, name)(**arguments)

    def current(self) -> bytes:
        """Return the serialised current database."""
        return self.db.serialize()

    def close(self) -> None:
        self.db.close()

    def query(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return self.db.execute(sql, params).fetchall()

    def row(self, table: str, key: str, what: str) -> dict[str, Any]:
        """Return one row by primary key. Raises ToolFailure ``no <what> <key>``."""
        cursor = self.db.execute(f"SELECT * FROM {table} WHERE id = ?", (key,))
        found = cursor.fetchone()
        if found is None:
            raise ToolFailure(_short(f"no {what} {key}"))
        return dict(zip((c[0] for c in cursor.description), found, strict=True))


def _short(message: str) -> str:
    """Truncate a message that may quote the policy, and make it encodable."""
    message = message.encode(errors="replace").decode()
    return message if len(message) <= 120 else message[:117] + "..."


def table(header: str, rows: Iterable[tuple[Any, ...]]) -> str:
    """Format rows as lines of words under a header line; ``none`` when there is no row."""
    lines = [" ".join(map(str, row)) for row in rows]
    return "\n".join([header, *lines]) if lines else "none"


def fresh_ids(rng: random.Random, prefix: str, count: int) -> list[str]:
    """Return distinct ids like ``T17``."""
    return [f"{prefix}{number}" for number in rng.sample(range(10, 100), count)]
