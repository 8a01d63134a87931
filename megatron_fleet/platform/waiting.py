"""Waiting for work that must not be left running, and what waits for what."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


async def until_done(*futures: asyncio.Future[Any]) -> None:
    """Wait until all ``futures`` are done, also when this task is cancelled meanwhile; they are not cancelled.

    Raises:
        CancelledError: this task was cancelled; raised once all are done.
    """
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def finish_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run ``work`` in a thread and return its result. A cancellation is raised after it has ended, since a thread
    cannot be stopped.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    await until_done(running)
    return running.result()


async def unless(work: Coroutine[Any, Any, T], interruption: Coroutine[Any, Any, BaseException]) -> T:
    """Run ``work``; if ``interruption`` returns first, cancel it, wait until it has ended, and raise what was returned.

    When this task is cancelled, both are.
    """
    working, waiting = asyncio.create_task(work), asyncio.create_task(interruption)
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        finished = working.done()
    finally:
        for task in (working, waiting):
            task.cancel()
        await until_done(working, waiting)
    if finished:
        return working.result()
    raise waiting.result()


async def together(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Run both at the same time, begun in this order, and return their results. When one fails, or this task is
    cancelled, cancel the other and wait until it has ended.
    """
    tasks = asyncio.create_task(first), asyncio.create_task(second)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await until_done(*tasks)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return tasks[0].result(), tasks[1].result()


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Return where the tasks of ``loop`` wait, innermost call first, as text; equal ones once. Any thread may call it.

    The stack of a thread that runs a loop says nothing of them.
    """
    found = Counter(_stack_of(task) for task in asyncio.all_tasks(loop))
    return "".join(f"{count} {'task' if count == 1 else 'tasks'}\n{stack}" for stack, count in found.most_common())


def _stack_of(task: asyncio.Task[Any]) -> str:
    lines: list[str] = []
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)) is not None:
        where = "/".join(Path(frame.f_code.co_filename).parts[-3:])
        lines.append(f"    {frame.f_code.co_qualname} ({where}:{frame.f_lineno})\n")
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return "".join(reversed(lines))
