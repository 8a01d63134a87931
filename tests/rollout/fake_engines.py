"""Engines that are not there: vLLM below an EngineActor, and a Ray actor below an EngineSlot."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from megatron_fleet.cluster import restarts
from megatron_fleet.rollout import components, engine_actor, engine_slot, sampler
from megatron_fleet.rollout.components import RayError
from megatron_fleet.rollout.engine_slot import EngineSlot
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.weight_sync.base import WeightReceiver

INIT_INFO = {"path": "memory"}
UPDATE = ["open_transport", "begin_update", "load", "finish_update"]


class FakeActor:
    """A Ray handle of an engine that obeys when ``may_start`` is set.

    Attributes:
        calls: names and arguments of all calls, those of other actors of the slot among them.
        fail: the call under which it dies.
        hang: the call that fails when the engine is lost, a little later.
    """

    def __init__(self, number: int, calls: list[Any], may_start: asyncio.Event) -> None:
        self.number = number
        self.calls, self.may_start, self.lost = calls, may_start, asyncio.Event()
        self.fail = self.hang = ""

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            if name == "watch":
                await self.lost.wait()
                return "killed"
            if name == "start":
                await self.may_start.wait()
            self.calls.append((name, *args))
            if name == self.fail:
                self.lost.set()
                raise RayError("its process died")
            if name == self.hang:
                await self.lost.wait()
                await asyncio.sleep(0.05)
                raise RayError("its process died")
            if name == "listen":
                return f"127.0.0.1:{self.number}"
            if name == "read_statistics":
                return EngineStatistics(steps=1)
            return "nothing freed" if name == "sleep" else None

        return type("Method", (), {"remote": staticmethod(call)})


class Slot(EngineSlot):
    """A slot of fake actors.

    Attributes:
        calls: of all its actors.
        killed: actors that were killed.
        moves: pairs of addresses of a lost engine and of the next.
        resend: what the slot finds when it asks for weights again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, joining: bool = False) -> None:
        self.calls: list[Any] = []
        self.killed: list[Any] = []
        self.moves: list[tuple[str, str]] = []
        numbers = itertools.count(1)
        self.resend: Callable[..., Any] | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()
        monkeypatch.setattr(restarts, "BACKOFF_S", 0.0)
        for module in (components, engine_slot):
            monkeypatch.setattr(module.ray, "kill", self.killed.append)
        timeouts = {"start_timeout_s": 300.0, "update_timeout_s": 300.0}

        async def make() -> FakeActor:
            return FakeActor(next(numbers), self.calls, self.may_start)

        async def on_move(before: str, now: str) -> None:
            self.moves.append((before, now))

        resend = {"resend": lambda: self.resend}
        super().__init__(
            "engine 0", "log", make, host="127.0.0.1", on_move=on_move, **resend, **timeouts, joining=joining
        )

    @property
    def actor(self) -> FakeActor:
        return self._actor

    @property
    def version(self) -> int | None:
        return None if self._loaded is None else self._loaded.version

    def names(self) -> list[str]:
        """Names of the calls since the last look."""
        names = [call[0] for call in self.calls]
        self.calls.clear()
        return names

    async def begin(self) -> None:
        await self.listen()
        await self.start()
        assert self.names() == ["listen", "start", "serve"]

    async def update(self, version: int, lasting: bool = True) -> None:
        """Give the slot a version, as a transport does."""
        await give(self, version, lasting)

    async def lose(self) -> None:
        """Let the engine die, and wait until the slot has seen it."""
        self.calls.clear()
        self.actor.lost.set()
        while self._serving.is_set():
            await asyncio.sleep(0)


async def give(engines: WeightReceiver, version: int, lasting: bool = True) -> None:
    """Give engines a version, as a transport does."""
    message = {"round": version}
    await engines.open_transport(INIT_INFO)
    await engines.begin_update()
    await engines.load(message)
    await engines.finish_update(version, message if lasting else None)


async def pause() -> None:
    """Let everything else go on for a while."""
    for _ in range(20):
        await asyncio.sleep(0.002)


def actor_without_vllm(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, config: Any, llm: Any) -> Any:
    monkeypatch.setattr(sampler, "write_output_to", lambda log: None)
    made = engine_actor.EngineActor(config, "", tmp_path / "log", "shm")
    made._llm = llm
    return made
