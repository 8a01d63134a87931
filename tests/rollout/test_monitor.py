"""Present state of a rollout: tallies of the current step, episodes on the timeline, readings of engines."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from waiting import in_simulated_time

from megatron_fleet.agents.trajectory import Outcome, Trajectory
from megatron_fleet.platform.timeline import TIMELINE
from megatron_fleet.rollout.engine_statistics import EngineStatistics
from megatron_fleet.rollout.monitor import SAMPLE_INTERVAL_S, EnvironmentTally, RolloutMonitor


@pytest.fixture(autouse=True)
def traced():
    TIMELINE.reset(1)
    TIMELINE.begin_step(0)
    yield
    TIMELINE.reset(0)


def episode(env: str, reward: float | None, stretches=(), **metrics: float) -> Trajectory:
    none = np.zeros(0, np.int32)
    numbers = none, none.astype(bool), none.astype(np.float32), ()
    outcome = Outcome.COMPLETED if reward is not None else Outcome.ENV_FAILED
    return Trajectory("a task", env, 0, 0, *numbers, reward, "", outcome, metrics=metrics, stretches=list(stretches))


def test_attempts_are_counted_by_environment_in_the_current_step():
    monitor = RolloutMonitor([])
    monitor.returned("worker 0", episode("shop", 1.0, tool_calls=3, tool_errors=1))
    monitor.returned("worker 1", episode("shop", 0.5, tool_calls=2))
    monitor.returned("worker 0", episode("bank", None, quarantined=1.0))
    assert list(monitor.environments().items()) == [
        ("bank", EnvironmentTally(1, 0, 0.0, 0, 0, 1)),
        ("shop", EnvironmentTally(2, 2, 1.5, 5, 1, 0)),
    ]
    TIMELINE.begin_step(1)
    assert monitor.environments() == {}
    monitor.returned("worker 0", episode("bank", 1.0))
    assert monitor.environments() == {"bank": EnvironmentTally(1, 1, 1.0)}


def test_episodes_are_slices_of_their_worker_in_traced_steps():
    monitor = RolloutMonitor([])
    stretches = [("episode", 100.0, 9.0), ("env", 100.0, 1.0), ("generate", 101.0, 7.0), ("verify", 108.0, 1.0)]
    monitor.returned("worker 3", episode("shop", 1.0, stretches, turns=1, seconds=9.0))
    monitor.returned("worker 3", episode("shop", None))  # was not played
    TIMELINE.end_step()
    played, _step = TIMELINE.traced.popleft().slices
    assert (played.group, played.lane, played.name, played.began, played.seconds) == ("worker 3", "", "a task", 100, 9)
    assert list(played.parts) == stretches[1:]
    assert played.arguments == {"turns": 1, "environment": "shop", "outcome": "completed", "reward": 1.0}


class Slot:
    """An engine that has counted twice as much each time, and hangs the third time."""

    def __init__(self, name: str) -> None:
        self.name, self.is_serving, self.tokens = name, True, 0

    async def sample(self) -> EngineStatistics:
        self.tokens += 10
        if self.tokens > 20:
            await asyncio.Event().wait()
        return EngineStatistics(steps=2, running=6, waiting=1, kv_usage=0.5, generated_tokens=self.tokens)


@in_simulated_time
async def test_engines_are_read_again_and_again_and_one_that_hangs_keeps_its_reading():
    monitor = RolloutMonitor([Slot("engine 0"), Slot("engine 1")])
    assert [reading.serving for reading in monitor.engines] == [False, False]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(9.5 * SAMPLE_INTERVAL_S):
            await monitor.watch()
    assert [(r.name, r.serving, r.counts.generated_tokens) for r in monitor.engines] == [
        ("engine 0", True, 20),
        ("engine 1", True, 20),
    ]
    TIMELINE.end_step()
    samples = [sample for sample in TIMELINE.traced.popleft().samples if sample.lane == "engine 1"]
    assert [dict(sample.values) for sample in samples] == 2 * [{"running": 3.0, "waiting": 0.5, "kv_cache": 0.25}]
