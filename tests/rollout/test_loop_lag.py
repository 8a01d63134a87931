"""The watchdog sees blocking calls and only those, and leaves no task behind."""

import asyncio

import pytest
from waiting import in_simulated_time

from megatron_fleet.rollout.loop_lag import LoopLag


@in_simulated_time
async def test_a_blocking_call_is_seen(caplog):
    lag = LoopLag()
    assert lag.quantile(0.99) == 0
    with lag.watching():
        await asyncio.sleep(0.12)
        assert lag.quantile(1.0) == pytest.approx(0)
        asyncio.get_running_loop().now += 1.5  # a call that lasts so long
        await asyncio.sleep(0.06)
    assert lag.quantile(1.0) == pytest.approx(0.12 + 1.5 - 0.15) and lag.quantile(0.01) == pytest.approx(0)
    assert "the event loop was blocked for 1.5 s" in caplog.text


async def test_it_watches_until_the_last_has_left():
    lag, before = LoopLag(), asyncio.all_tasks()
    with lag.watching():
        with lag.watching():
            await asyncio.sleep(0)
            assert len(asyncio.all_tasks() - before) == 1
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks() - before) == 1
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    with lag.watching():
        await asyncio.sleep(0.11)
    assert lag.quantile(1.0) > 0 or lag._samples
