"""Times that trainer and engines wait for each other."""

from __future__ import annotations

import asyncio

import pytest
from fake_rollout import FakeRollout
from waiting import LOOP_TIME, in_simulated_time

from megatron_fleet.config.load import load
from megatron_fleet.loop import batches
from megatron_fleet.loop.run_tasks import load_data

OVERRIDES = ("experiment=quickstart", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "run.steps=9")
AHEAD = ("algorithm=importance_weighted", "rollout.max_staleness=1")


@pytest.mark.parametrize(
    ("overrides", "first", "later"),
    [
        # Episodes of 3 s and training of 1 s, one after the other.
        ((), {"trainer_waits_share": 1.0, "engines_idle_share": 0.0},
         {"trainer_waits_share": 0.75, "engines_idle_share": 0.25}),
        # The episodes of step 1 play beside those of step 0, and there is nothing to play while the trainer works.
        (AHEAD, {"trainer_waits_share": 1.0, "engines_idle_share": 0.0},
         {"trainer_waits_share": 0.0, "engines_idle_share": 1.0}),
    ],
)  # fmt: skip
@in_simulated_time
async def test_shares_of_time_are_of_the_time_since_the_batch_before(tmp_path, monkeypatch, overrides, first, later):
    monkeypatch.setattr(batches, "time", LOOP_TIME)
    config = load([*OVERRIDES, f"run.out={tmp_path}", *overrides])
    rollout = FakeRollout(16)
    rollout.delays = dict.fromkeys(range(9), 3.0)
    made = batches.Batches(config, load_data(config)[0], rollout)
    try:
        assert (await made.next(0, lambda _: None)).waits == pytest.approx(first)
        await asyncio.sleep(1.0)
        rollout.engines.version = 1
        assert (await made.next(1, lambda _: None)).waits == pytest.approx(later)
    finally:
        await made.close()
