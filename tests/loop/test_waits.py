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


def tasks_of(config):
    return load_data(config)[0]


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
    made = batches.Batches(config, tasks_of(config), rollout)
    try:
        assert (await made.next(0, lambda *_: None)).waits == pytest.approx(first)
        await asyncio.sleep(1.0)
        rollout.engines.version = 1
        assert (await made.next(1, lambda *_: None)).waits == pytest.approx(later)
    finally:
        await made.close()


@in_simulated_time
async def test_a_group_that_is_too_old_is_played_again_while_others_still_play(tmp_path, monkeypatch):
    """A group of 1 s is judged when it is back, and not when the one of 5 s is."""
    monkeypatch.setattr(batches, "time", LOOP_TIME)
    config = load([*OVERRIDES, f"run.out={tmp_path}", *AHEAD, "run.steps=1"])
    rollout, clock, events, shown = FakeRollout(16), asyncio.get_running_loop(), [], []
    played = rollout.collect

    async def collect(request, *how):
        events.append((request.first, clock.time() - began))
        first_time = sum(place == request.first for place, _ in events) == 1
        rollout.engines.version = -5 if request.first == 1 and first_time else 0
        result = await played(request, *how)
        result.seconds = 5.0 if request.first == 0 else 1.0
        await asyncio.sleep(result.seconds)
        return result

    rollout.collect, began = collect, clock.time()
    made = batches.Batches(config, tasks_of(config), rollout)
    try:
        batch = await made.next(0, lambda ended, awaited: shown.append(ended))
    finally:
        await made.close()
    assert shown[-1] == 16
    assert events == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (1, pytest.approx(1.0))]
    assert clock.time() - began == pytest.approx(5.0) and batch.seconds["generate"] == 5.0
    assert batch.seconds["engines_idle"] == pytest.approx(0.0)
    assert (batch.accounting.stale, batch.accounting.known, batch.accounting.started) == (4, 16, 20)
    assert [(group.index, len(group.trajectories)) for group in batch.groups] == [(0, 4), (1, 4), (2, 4), (3, 4)]


@in_simulated_time
async def test_what_is_shown_of_a_step_are_its_own_episodes(tmp_path):
    """Not those of the step that plays ahead of it."""
    config, shown = load([*OVERRIDES, f"run.out={tmp_path}", *AHEAD]), []
    rollout = FakeRollout(16)
    rollout.delays = {0: 3.0, 1: 1.0}
    made = batches.Batches(config, tasks_of(config), rollout)
    try:
        await made.next(0, lambda ended, awaited: shown.append(ended))
    finally:
        await made.close()
    assert shown[:6] == [0] * 6 and max(shown) == shown[-1] == 16  # twice a second


@in_simulated_time
async def test_engines_are_idle_only_while_no_group_of_any_step_plays(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "time", LOOP_TIME)
    config = load([*OVERRIDES, f"run.out={tmp_path}", *AHEAD])
    rollout = FakeRollout(16)
    rollout.delays = {0: 3.0, 1: 5.0}
    made = batches.Batches(config, tasks_of(config), rollout)
    try:
        await made.next(0, lambda *_: None)
        await asyncio.sleep(1.0)
        rollout.engines.version = 1
        assert (await made.next(1, lambda *_: None)).waits["engines_idle_share"] == 0
    finally:
        await made.close()
