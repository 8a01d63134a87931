"""TaskType: how a kind of task is made, told, checked and solved."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from string import Formatter
from typing import Any, TypeVar

from megatron_fleet.envs.base import Observation, ToolCall
from megatron_fleet.envs.embedded.world import World

DONE = "done"
"""The final answer of a task that asks for no answer."""

T = TypeVar("T")
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """The last turn of an episode."""

    text: str


Turn = ToolCall | Answer
Turns = Generator[Turn, Observation, None]
"""A scripted agent: yields turns, is sent what the environment showed."""
Steps = Generator[ToolCall, Observation, T]
"""A part of a scripted agent that returns a value."""


class GaveUp(Exception):
    """The scripted agent met an error that it caused itself and has no way back from."""


class Goal:
    """What a verifier will demand: the rows that vanish and appear, and the final answer."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.removed: list[tuple[Any, ...]] = []
        self.added: list[tuple[Any, ...]] = []
        self.answer: str | None = None

    def update(self, table: str, key: str, **changes: Any) -> None:
        """Row ``key`` of ``table`` takes new values."""
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
        phrasings: prompts with named fields; the fields can be read back from a prompt, so a solver needs nothing else.
        make: picks the fields in a world and writes down the goal; ``None`` when this world offers no such task.
        solve: a scripted agent's steps, given the fields; returns the final answer.
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
        """The fields of a prompt of this type; ``None`` for any other prompt."""
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
    """The decision points of a scripted agent, each of which it gets wrong with probability ``mistakes``.

    Every wrong choice could have been made right from the conversation alone, so a policy that imitates such an agent
    can be improved without new information.

    Attributes:
        notes: what was decided since the last turn, as the agent might write it down before it acts: rows, beginning
            with what they were chosen by, and whether conditions hold.
    """

    user: str
    mistakes: float
    rng: random.Random
    notes: list[str] = field(default_factory=list)

    def slips(self) -> bool:
        return self.mistakes > 0 and self.rng.random() < self.mistakes

    def value(self, right: T, wrong: Sequence[T]) -> T:
        """``right``, or by mistake one of ``wrong``."""
        return self.rng.choice(wrong) if wrong and self.slips() else right

    def row(self, rows: list[Row], **match: str) -> Row:
        """The row with these values, or by mistake another one."""
        right = [r for r in rows if match.items() <= r.items()]
        if not right:
            raise GaveUp
        row = self.value(right[0], [r for r in rows if r is not right[0]])
        others = {column: value for column, value in row.items() if column not in match}
        self.notes.append(" ".join([*(row[column] for column in match), *others.values()]))
        return row

    def holds(self, condition: bool) -> bool:
        """A condition read from a result, or by mistake its opposite."""
        held = condition != self.slips()
        self.notes.append("yes" if held else "no")
        return held

    def forgets(self) -> bool:
        """By mistake, a change is left out."""
        return self.slips()

    def look(self, name: str, **arguments: Any) -> Steps[list[Row]]:
        """Read with a tool and return its rows; by mistake (harmless, so rarer) read the same twice."""
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
        """Choose a row and act on it; an error shows the mistake, and one second choice is made."""
        for _ in range(2):
            row = self.row(rows, **match)
            observation = yield call(row)
            if observation.error is None:
                return row
        raise GaveUp


def parse_table(text: str) -> list[Row]:
    """Rows of a tool result made by ``world.table``; other texts have none."""
    header, *lines = text.split("\n")
    return [dict(zip(header.split(), line.split(), strict=True)) for line in lines]
