"""Interrupt a program wherever its training loop waits: counts the suspensions, and sends a signal at one of them."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import types
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, NamedTuple

import megatron_fleet.loop

LOOP = Path(megatron_fleet.loop.__file__).parent


class Place(NamedTuple):
    """An ``await`` of the loop: the innermost line of `megatron_fleet.loop` that waits, and all lines of ``train.py``
    that wait for it, outermost first.
    """

    inner: str
    outer: str


class Moment(NamedTuple):
    """The suspension of number ``count`` (from 1, since the signal before) at a place, and the signal to send there."""

    place: Place
    count: int
    signal: signal.Signals


class Interruptions:
    """Task factory of an event loop; `install` it before the work begins."""

    def __init__(self, *moments: Moment, told: Callable[[Place], None] = lambda place: None) -> None:
        """Args: ``told``: called at each suspension."""
        self._moments, self._seen, self._told = list(moments), dict[Place, int](), told

    def install(self) -> None:
        asyncio.get_running_loop().set_task_factory(
            lambda loop, work, **named: asyncio.Task(self._stepped(work), loop=loop, **named)
        )

    @types.coroutine
    def _stepped(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        step, argument = work.send, None
        while True:
            try:
                waits_for = step(argument)
            except StopIteration as end:
                return end.value
            if (place := place_of(work)) is not None:
                self._suspended(place)
            try:
                argument, step = (yield waits_for), work.send
            except BaseException as error:
                argument, step = error, work.throw

    def _suspended(self, place: Place) -> None:
        self._seen[place] = count = self._seen.get(place, 0) + 1
        self._told(place)
        if self._moments and (place, count) == self._moments[0][:2]:
            self._seen.clear()
            os.kill(os.getpid(), self._moments.pop(0).signal)


def place_of(work: Any) -> Place | None:
    """Where a suspended coroutine waits; ``None`` outside the loop."""
    lines: list[tuple[str, str]] = []
    while (frame := getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)) is not None:
        file = Path(frame.f_code.co_filename)
        if file.parent == LOOP:
            lines.append((file.name, f"{file.stem}.{frame.f_code.co_qualname}:{frame.f_lineno}"))
        work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
    if not lines:
        return None
    return Place(lines[-1][1], " ".join(line for name, line in lines if name == "train.py"))


def awaits() -> dict[int, str]:
    """Every ``await`` and ``async with`` of the training loop: first line of its statement, and the statement."""
    source = (LOOP / "train.py").read_text()
    [training] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Training"]
    found: dict[int, str] = {}
    for node in ast.walk(training):
        if isinstance(node, ast.Await):
            found[node.lineno] = ast.unparse(node)
        elif isinstance(node, ast.AsyncWith):
            found[node.lineno] = f"async with {ast.unparse(node.items[0])}"
    return found
