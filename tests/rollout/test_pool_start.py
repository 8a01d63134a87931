"""Warnings while engines start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from megatron_fleet.config.schema import EngineConfig
from megatron_fleet.rollout import pool


class Engine:
    """An engine that starts when it may."""

    def __init__(self, number, log):
        self.name, self.log = f"engine {number}", str(log)
        self.is_serving, self.may = False, asyncio.Event()

    async def listen(self):
        pass

    async def start(self):
        await self.may.wait()
        self.is_serving = True


async def test_engines_that_are_late_are_named_with_the_end_of_a_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pool, "TELL_S", 0.01)
    (tmp_path / "engine-1.log").write_text("loading\nCapturing CUDA graphs:  10%\rCapturing CUDA graphs:  45%")
    starting = object.__new__(pool.Pool)
    starting._config = SimpleNamespace(rollout=SimpleNamespace(engine=EngineConfig()))
    starting._listening = asyncio.Event()
    starting.eval_engines = []
    starting.engines = [Engine(n, tmp_path / f"engine-{n}.log") for n in range(3)]
    task = asyncio.create_task(starting._start_engines())
    starting.engines[0].may.set()
    while "engine 1, engine 2; the end" not in caplog.text:
        await asyncio.sleep(0)
    assert "engine-1.log: Capturing CUDA graphs:  45%" in caplog.messages[-1]
    assert "of at most 1200 s (rollout.engine.start_timeout_s)" in caplog.messages[-1]
    starting.engines[1].may.set()
    while not caplog.messages[-1].endswith(": engine 2"):  # its log is on another host
        await asyncio.sleep(0)
    starting.engines[2].may.set()
    await task
    said = len(caplog.messages)
    await asyncio.sleep(0.05)
    assert len(caplog.messages) == said
