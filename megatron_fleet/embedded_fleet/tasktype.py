"""Task types: generation, phrasing, verification and solution of one kind of task."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from string import Formatter
from typing import Any, TypeVar

from megatron_fleet.embedded_fleet.world import World
from megatron_fleet.envs.base import Observation, ToolCall

DONE = "done"
"""Final answer of a task that asks for none."""

T = TypeVar("T")
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The last turn of an episode."""

    text: str


Turn = ToolCall | FinalAnswer
Turns = Generator[Turn, Observation, None]
"""A scripted agent: yields turns, receives observations."""
Steps = Generator[ToolCall, Observation, T]
"""A part of a scripted agent that returns a value."""


class GaveUp(Exception):
    """The scripted agent caused an error that it cannot recover from."""


class Goal:
    """Expected result that a verifier checks: the rows removed and added, and the final answer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.removed: list[tuple[Any, ...]] = []
        self.added: list[tuple[Any, ...]] = []
        self.answer: str | None = None

    def update(self, table: str, key: str, **changes: Any) -> None:
        """Record new values for row ``key`` of ``table``."""
        columns = self._world.columns[table].split(", ")
        old = self._world.row(table, key, table)
        self.removed.append((table, *(old[c] for c in columns)))
        self.added.append((table, *(changes.get(c, old[c]) for c in columns)))

    def insert(self, table: str, *values: Any) -> None:
        self.added.append((table, *values))

    def delete(self, table: str, key: str) -> None:
        old = self._world.row(table, key, table)
        self.removed.append((table, *(old[c] for c in self._world.columns[table].split(", "))))


@dataclass(frozen=True)
class TaskType:
    """One kind of task.

    Attributes:
        phrasings: prompts with named fields, which can be parsed from a prompt, so a solver needs nothing else.
        make: picks the fields in a world and records the goal; ``None`` when this world offers no such task.
        solve: steps of a scripted agent, given the fields; returns the final answer.
    """

    name: str
    difficulty: int
    phrasings: tuple[str, ...]
    make: Callable[[World, random.Random, Goal], dict[str, Any] | None]
    solve: Callable[..., Steps[str]] = field(repr=False)

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(_pattern(phrasing)) for phrasing in self.phrasings]

    def read(self, prompt: str) -> dict[str, str] | None:
        """Parse the fields of a prompt of this type; ``None`` for any other prompt."""
        for pattern in self._patterns:
            if match := pattern.fullmatch(prompt):
                return match.groupdict()
        return None


def _pattern(phrasing: str) -> str:
    parts = []
    for text, name, _, _ in Formatter().parse(phrasing):
        parts.append(re.escape(text))
        if name is not None:
            parts.append(f"(?P<{name}>[A-Za-z0-9-]+)")
    return "".join(parts)


@dataclass(slots=True)
class Choices:
    """Decision points of a scripted agent; each goes wrong with probability ``mistakes``.

    Every wrong choice could have been made correctly from the conversation alone, so a policy that imitates such an
    agent can be improved without new information.

    Attributes:
        notes: decisions since the last turn, as the agent might write them down before it acts: rows, starting with
            the values they were chosen by, and whether conditions hold.
    """

    user: str
    mistakes: float
    rng: random.Random
    notes: list[str] = field(default_factory=list)

    def slips(self) -> bool:
        return self.mistakes > 0 and self.rng.random() < self.mistakes

    def value(self, right: T, wrong: Sequence[T]) -> T:
        """Return ``right``, or by mistake one of ``wrong``."""
        return self.rng.choice(wrong) if wrong and self.slips() else right

    def row(self, rows: list[Row], **match: str) -> Row:
        """Return the row with these values, or by mistake another one."""
        right = [r for r in rows if match.items() <= r.items()]
        if not right:
            raise GaveUp
        row = self.value(right[0], [r for r in rows if r is not right[0]])
        others = {column: value for column, value in row.items() if column not in match}
        self.notes.append(" ".join([*(row[column] for column in match), *others.values()]))
        return row

    def holds(self, condition: bool) -> bool:
        """Return a condition read from a result, or by mistake its opposite."""
        held = condition != self.slips()
        self.notes.append("yes" if held else "no")
        return held

    def forgets(self) -> bool:
        """Return whether a change is left out by mistake."""
        return self.slips()

    def look(self, name: str, **arguments: Any) -> Steps[list[Row]]:
        """Call a reading tool and return its rows; by mistake (harmless, so rarer) call it twice."""
        if self.slips() and self.rng.random() < 0.3:
            yield from self.do(name, **arguments)
        return (yield from self.do(name, **arguments))

    def do(self, name: str, **arguments: Any) -> Steps[list[Row]]:
        """Call a tool and return its rows."""
        observation = yield ToolCall(name, arguments)
        if observation.error is not None:
            raise GaveUp
        return parse_table(observation.content)

    def act(self, name: str, **arguments: Any) -> Steps[None]:
        """Call a tool that changes something, unless forgotten."""
        if not self.forgets():
            yield from self.do(name, **arguments)

    def act_on(self, rows: list[Row], match: Row, call: Callable[[Row], ToolCall]) -> Steps[Row]:
        """Choose a row and act on it; after an error, which reveals a mistake, choose once more."""
        for _ in range(2):
            row = self.row(rows, **match)
            observation = yield call(row)
            if observation.error is None:
                return row
        raise GaveUp


def parse_table(text: str) -> list[Row]:
    """Parse the rows of a tool result made by ``world.table``; other texts have none."""
    header, *lines = text.split("\n")
    return [dict(zip(header.split(), line.split(), strict=True)) for line in lines]
