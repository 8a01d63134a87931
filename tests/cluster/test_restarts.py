"""Restarts of a component: pauses that grow to a limit, and a number of restarts within an hour."""

from __future__ import annotations

import asyncio

import pytest
from waiting import LOOP_TIME, in_simulated_time

from megatron_fleet.cluster import restarts
from megatron_fleet.cluster.restarts import OutOfRestarts, Restarts


@in_simulated_time
async def test_pauses_double_up_to_a_minute(monkeypatch):
    monkeypatch.setattr(restarts, "time", LOOP_TIME)
    kept, pauses = Restarts("the trainer", "Look there.", 20), []
    for _ in range(20):
        before = asyncio.get_running_loop().time()
        await kept.pause("it died")
        pauses.append(asyncio.get_running_loop().time() - before)
    assert pauses == [1, 2, 4, 8, 16, 32, *[60] * 14]
    with pytest.raises(OutOfRestarts, match=r"the trainer died 21 times, last: it died\. Look there\."):
        await kept.pause("it died")
    await asyncio.sleep(restarts.MEMORY_S)
    await kept.pause("it died")
    assert kept.count == 21


@in_simulated_time
async def test_patience_goes_on_beyond_the_limit_and_ends(monkeypatch):
    monkeypatch.setattr(restarts, "time", LOOP_TIME)
    kept, now = Restarts("the environment server", "Look there.", 3, patience_s=300), asyncio.get_running_loop().time
    for _ in range(3):
        await kept.pause("it died")
    began = now()
    with pytest.raises(OutOfRestarts, match=r"the environment server died 11 times, last: it died\. Look there\."):
        while True:
            await kept.pause("it died")
    assert now() - began == 8 + 16 + 32 + 4 * 60
    await asyncio.sleep(restarts.MEMORY_S)
    for _ in range(4):
        await kept.pause("it died")  # the patience is as long as before
