"""Execution of a task's verifier on two databases. Standard library only: the verifier host loads nothing else."""

from __future__ import annotations

import inspect
import math
import sqlite3
from collections.abc import Callable
from typing import Any


class Database:
    """Read-only database with ``query``, returned to a verifier by ``env.db(name)``."""

    def __init__(self, content: bytes) -> None:
        self._connection = sqlite3.connect(":memory:")
        self._connection.deserialize(content)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA query_only = 1")

    def query(self, sql: str, params: Any = ()) -> list[dict[str, Any]]:
        return [dict(row) for row in self._connection.execute(sql, params)]


class VerifierEnv:
    """The ``env`` argument of a verifier: databases ``seed`` (initial) and ``current`` (final)."""

    def __init__(self, seed: bytes, current: bytes) -> None:
        self._databases = {"seed": Database(seed), "current": Database(current)}

    def db(self, name: str = "current") -> Database:
        return self._databases[name]


def run_verifier(
    code: str, seed: bytes, current: bytes, final_answer: str | None, conversation: list[dict[str, Any]] | None
) -> float:
    """Execute ``code`` and return its verdict.

    The function is ``validate_task`` or ``verify``; ``final_answer`` and ``conversation`` are passed if its signature
    has them. The code runs in the calling process: only the verifier host's children, and callers that generated the
    code themselves, may do that.

    Raises:
        ValueError: no such function, or a verdict that is not a finite number.
        BaseException: whatever the code raises.
    """
    scope: dict[str, Any] = {"__name__": "verifier"}
    exec(compile(code, "<verifier>", "exec"), scope)
    verdict = _entry(scope)(
        VerifierEnv(seed, current), **_wanted(scope, final_answer=final_answer, conversation=conversation)
    )
    if not isinstance(verdict, (bool, int, float)):
        raise ValueError(f"returned {type(verdict).__name__}, expected a number")
    if not math.isfinite(verdict):
        raise ValueError(f"returned {verdict}, expected a finite number")
    return float(verdict)


def _entry(scope: dict[str, Any]) -> Callable[..., Any]:
    for name in ("validate_task", "verify"):
        if callable(scope.get(name)):
            return scope[name]
    raise ValueError("defines neither validate_task nor verify")


def _wanted(scope: dict[str, Any], **offered: Any) -> dict[str, Any]:
    names = inspect.signature(_entry(scope)).parameters
    return {name: value for name, value in offered.items() if name in names}
