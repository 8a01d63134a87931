"""What a live run writes for others: its state to the end, its warnings, traces, and stacks although its loop hangs."""

from __future__ import annotations

import asyncio
import logging
import re
from types import SimpleNamespace

import pytest
from trace_events import read_trace
from waiting import until, wait_until

from megatron_fleet.config.load import load
from megatron_fleet.loop import live, watchdog
from megatron_fleet.loop.live import LiveRun
from megatron_fleet.loop.stopping import Stopped
from megatron_fleet.platform.timeline import TIMELINE, Awaited
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.rollout.monitor import EngineReading, EnvironmentTally, Load
from megatron_fleet.telemetry.status import AwaitedStatus, EngineStatus, EnvironmentStatus, read_status

COUNTS = EngineStatistics(steps=4, running=8, waiting=2, kv_usage=1.0, generated_tokens=30)
LOAD = Load(
    [EngineReading("engine 0", True, COUNTS, 2.0)],
    {"shop": EnvironmentTally(3, 2, 1.5, 9, 1, 0)},
    playing=5,
    waiting=7,
    allowed=6,
)


class Rollout:
    run_id = "no process has it"

    def __init__(self):
        self.failure: Exception | None = None

    def live(self):
        if self.failure is not None:
            raise self.failure
        return LOAD


def live_run(config):
    return LiveRun(config.run, config.logging, 10.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(live, "INTERVAL_S", 0.01)
    yield
    TIMELINE.reset(0)


def config(out, *overrides):
    return load(["experiment=quickstart", f"run.out={out}", "run.id=demo_1", "run.steps=40", *overrides])


async def test_the_state_is_written_while_the_run_goes_on(tmp_path):
    with live_run(config(tmp_path)) as run:
        await until(lambda: read_status(tmp_path) is not None)
        assert (read_status(tmp_path).state, read_status(tmp_path).step_began) == ("running", None)
        run.rollout = Rollout()
        TIMELINE.begin_step(3)
        with TIMELINE.phase("rollout", 32) as phase:
            phase.done = 12
            phase.awaited = [Awaited("t7", "maps", 990.0, 3, 4)]
            logging.getLogger("megatron_fleet.test").warning("engine %d is slow", 0)
            await until(lambda: (now := read_status(tmp_path)).alerts and now.phases and now.engines)
        now = read_status(tmp_path)
        assert (now.name, now.id, now.started, now.step, now.steps) == ("quickstart", "demo_1", 10.0, 3, 40)
        assert [(p.name, p.done, p.total) for p in now.phases] == [("rollout", 12, 32)]
        assert now.phases[0].awaited == [AwaitedStatus("t7", "maps", 990.0, 3, 4)] and now.allowed == 6
        assert now.engines == [EngineStatus("engine 0", True, 2.0, 0.5, 0.25, 15.0)]
        assert now.environments == {"shop": EnvironmentStatus(3, 2, 0.75, 9, 1, 0)}
        assert (now.playing, now.waiting) == (5, 7) and now.memory["controller"] > 1 << 20
        assert [(a.level, a.text) for a in now.alerts] == [("WARNING", "engine 0 is slow")]
        assert now.alerts[0].time >= now.step_began
    assert read_status(tmp_path).state == "finished"


@pytest.mark.parametrize(
    ("error", "state"),
    [(Stopped("SIGTERM"), "stopped"), (asyncio.CancelledError(), "stopped"), (OSError("x"), "failed")],
)
async def test_the_last_state_says_how_it_ended(tmp_path, error, state):
    with pytest.raises(type(error)), live_run(config(tmp_path)):
        raise error
    assert read_status(tmp_path).state == state


async def test_traces_of_the_wanted_steps_are_written(tmp_path):
    with live_run(config(tmp_path, "logging.trace_every=2")):
        for step in range(4):
            TIMELINE.begin_step(step)
            with TIMELINE.phase("policy_train"):
                await until(lambda: not TIMELINE.traced)
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == ["step-000001.json.gz", "step-000002.json.gz", "step-000004.json.gz"]
    for name in names:
        events = read_trace(tmp_path / "traces" / name)["traceEvents"]
        assert {event["name"] for event in events if event["ph"] == "X"} == {f"step {int(name[5:11])}", "policy_train"}


async def test_what_fails_here_is_told_once_and_ends_nothing(tmp_path, caplog):
    with live_run(config(tmp_path)) as run:
        run.rollout = Rollout()
        run.rollout.failure = KeyError("gone")
        await until(lambda: "KeyError" in caplog.text)
        before = read_status(tmp_path)
        run.rollout.failure = None
        await until(lambda: (now := read_status(tmp_path)) != before and now.engines)
    assert caplog.text.count("status.json could not be updated") == 1 and read_status(tmp_path).state == "finished"


async def test_stacks_are_written_although_the_event_loop_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "UNKNOWN_S", 0.0)

    def the_controller_hangs():
        wait_until(lambda: list((tmp_path / "logs").glob("stall-*.txt")))

    async def idle():
        await asyncio.Event().wait()

    waiting = [asyncio.create_task(idle()) for _ in range(2)]
    await asyncio.sleep(0)
    with live_run(config(tmp_path)) as run:
        run.ranks, run.rollout = SimpleNamespace(processes=[("far away", 7), ("far away", 8)]), Rollout()
        with TIMELINE.phase("rollout"):
            the_controller_hangs()
        await until(lambda: read_status(tmp_path).alerts)
        assert "rollout has taken" in read_status(tmp_path).alerts[0].text
    (file,) = (tmp_path / "logs").glob("stall-*.txt")
    text = file.read_text()
    assert all(task.cancel() for task in waiting)
    assert "the_controller_hangs" in text
    assert re.search(r"2 tasks\n    Event.wait \(.*\)\n    .*idle \(tests/loop/test_live.py:\d+\)\n", text)
    assert "=== host far away\npid 7: not asked; `py-spy" in text and "pid 8: " in text


async def test_the_watchdog_can_be_turned_off(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "UNKNOWN_S", 0.0)
    with live_run(config(tmp_path, "logging.alerts.stall=null")), TIMELINE.phase("rollout"):
        for _ in range(2):
            before = read_status(tmp_path)
            await until(lambda before=before: read_status(tmp_path) != before)
    assert not list(tmp_path.glob("logs/stall-*.txt"))
