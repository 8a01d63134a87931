"""The simulator: against what can be computed by hand, and what failures and staleness do."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_maker import trajectory

pytest.importorskip("hydra")

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import dump_resolved, load
from megatron_fleet.planning.hardware import GPUS
from megatron_fleet.planning.scaling import simulate
from megatron_fleet.planning.simulation import Setup, Simulation
from megatron_fleet.planning.workload import Workload
from megatron_fleet.telemetry.shards import encode

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import simulator

EQUAL = Setup(
    engines=2, slots=4, token_s=lambda n: 0.01 * n, lengths=np.array([100.0]), waiting_s=0.0, episodes=8, trainer_s=6.0,
    sync_s=1.0, failures=0.0,
)  # fmt: skip
"""Four equal episodes on each engine: 4 s of rollout, 6 of training and 1 of sync."""


def test_equal_episodes_take_what_arithmetic_says():
    found = Simulation(EQUAL).play(5)
    assert found.step_s == pytest.approx(4 + 6 + 1)
    assert found.trainer_busy == pytest.approx(7 / 11) and found.engines_busy == pytest.approx(4 / 11)
    assert found.slots_used == pytest.approx(4 / 11)
    assert (found.episodes, found.replayed, found.staleness) == (40, 0, 0.0)


def test_more_episodes_than_slots_wait_for_one():
    assert Simulation(replace(EQUAL, episodes=16)).play(3).step_s == pytest.approx(8 + 7)


def test_engines_share_their_speed():
    """A group of an episode of 100 tokens and one of 300: 2 s together, then 2 alone."""
    group = np.array([[100.0, 300.0]])
    setup = replace(EQUAL, engines=1, episodes=2, samples=2, lengths=group, trainer_s=0.0, sync_s=0.0)
    assert Simulation(setup).play(1).seconds == pytest.approx(100 * 0.02 + 200 * 0.01)


def test_playing_ahead_hides_the_shorter_of_both():
    """Rollout takes 4 s and stands still for 1; the trainer needs 7, so that it is never without data."""
    on_policy, ahead = (Simulation(replace(EQUAL, staleness=k)).play(40) for k in (0, 1))
    assert on_policy.step_s == pytest.approx(11) and ahead.step_s == pytest.approx(7, rel=0.03)
    assert 0.9 < ahead.staleness <= 1.0


def test_no_episode_is_older_than_the_bound():
    for bound in (0, 1, 3):
        setup = replace(EQUAL, staleness=bound, lengths=np.geomspace(10, 1000, 50), trainer_s=1.0)
        simulation = Simulation(setup)
        ages: list[int] = []
        train = simulation._train

        def watched(train=train, ages=ages, simulation=simulation):
            before = list(simulation._groups)
            train()
            for group in before:
                if group not in simulation._groups and not group.dropped:
                    ages.extend(simulation._version - version for version in group.versions.values())

        simulation._train = watched
        simulation.play(15)
        assert len(ages) == 15 * 8 and max(ages) <= bound


TAILED = replace(
    EQUAL, engines=1, slots=16, episodes=8, samples=2, token_s=lambda n: 0.04, lengths=np.array([50.0] * 15 + [850.0]),
    trainer_s=2.0, colocated=True,
)  # fmt: skip
"""An episode in sixteen takes 34 s, the others 2 s."""


@pytest.mark.parametrize(
    ("changes", "faster"),
    [
        ({"staleness": 1}, 0.9),
        ({"staleness": 6, "ahead": 1.0, "window": None}, 0.6),
        ({"ahead": 1.0, "window": None, "unfinished": "again"}, 0.9),
    ],
)
def test_what_need_not_be_waited_for_makes_steps_shorter(changes, faster):
    waiting, found = (Simulation(setup).play(60) for setup in (TAILED, replace(TAILED, **changes)))
    assert found.episodes == waiting.episodes == 60 * 8
    assert found.step_s < faster * waiting.step_s
    assert found.staleness <= changes.get("staleness", 0)


def test_nothing_is_gained_where_an_update_waits_for_all_that_plays():
    waiting, found = (Simulation(s).play(60) for s in (TAILED, replace(TAILED, staleness=1, unfinished="wait")))
    assert found.step_s == pytest.approx(waiting.step_s, rel=0.06)


def test_colocated_engines_stand_still_while_the_trainer_works():
    apart, colocated = (Simulation(replace(EQUAL, staleness=1, colocated=c)).play(40).step_s for c in (False, True))
    assert apart == pytest.approx(7, rel=0.03) and colocated == pytest.approx(4 + 6 + 1, rel=0.03)


def test_a_batch_that_is_waited_for_is_that_of_a_window_of_one():
    """Whole batches ahead, in order: groups of one episode or of eight, it makes no difference to equal episodes."""
    one, eight = (Simulation(replace(EQUAL, staleness=1, samples=n)).play(40).step_s for n in (1, 8))
    assert one == pytest.approx(eight)


def test_long_tails_leave_engines_idle():
    tailed = replace(EQUAL, lengths=np.array([50.0] * 15 + [850.0]), episodes=8)
    assert tailed.lengths.mean() == 100
    equal, long = (Simulation(setup).play(30) for setup in (EQUAL, tailed))
    assert long.slots_used < 0.8 * equal.slots_used and long.step_s > equal.step_s


def test_failures_cost_time_and_lose_no_step():
    failing = Simulation(replace(EQUAL, failures=0.3)).play(30)
    assert failing.replayed == pytest.approx(30 * 8 * 0.3 / 0.7, rel=0.35)
    assert failing.episodes == 240 and failing.step_s > 11
    lost = Simulation(replace(EQUAL, mtbf_hours=0.05, gpus_of_trainer=1, restart_s=30.0, checkpoint_interval=5)).play(
        30
    )
    assert lost.engine_losses > 0 and lost.trainer_losses > 0
    assert lost.step_s > 12 and lost.episodes >= 240


def test_shared_processors_slow_both():
    """Each would take 7 and 5 s of a step alone; together they cannot be faster than one after the other."""
    shared = Simulation(replace(EQUAL, staleness=1, contention=2.0)).play(40)
    assert 10.9 < shared.step_s < 11.2


def test_tools_are_not_slowed_by_shared_processors():
    tools = replace(EQUAL, staleness=1, token_s=lambda n: 0.04, waiting_s=4.0, waiting_sigma=0.0)
    alone, shared = (Simulation(replace(tools, contention=c, trainer_s=2.0)).play(40).step_s for c in (1.0, 2.0))
    computing = Simulation(replace(tools, contention=2.0, trainer_s=2.0, waiting_s=0.0)).play(40).step_s
    assert alone < shared < computing


def test_colocated_engines_share_no_processor_with_the_trainer():
    """They sleep while it works."""
    colocated = replace(TAILED, staleness=2)
    assert Simulation(replace(colocated, contention=3.0)).play(20) == Simulation(colocated).play(20)


def test_engines_are_filled_again_during_updates_where_any_group_may_come_next():
    apart = replace(TAILED, staleness=9, ahead=1.0, colocated=False, trainer_s=2.0, slots=4)
    refilled, not_refilled = (Simulation(replace(apart, window=w)).play(60) for w in (None, 1000))
    assert refilled.step_s < not_refilled.step_s


def test_tools_go_on_while_colocated_engines_stand_still():
    """Episodes that only wait for a tool are as fast as if there were no update."""
    ahead = replace(TAILED, staleness=6, ahead=1.0, window=None, trainer_s=4.0, waiting_sigma=0.0)
    none, half, all_ = (
        Simulation(replace(ahead, waiting_s=w, tool_left_s=1e9)).play(60).step_s for w in (0.0, 2.0, 4.0)
    )
    assert all_ < half < none


def test_an_episode_that_is_played_again_takes_as_long_again():
    """So a task of long episodes is not played until it has short ones."""
    certain = replace(
        EQUAL, engines=1, slots=1, episodes=1, lengths=np.array([100.0, 900.0]), trainer_s=0.0, sync_s=0.0
    )
    seconds = [Simulation(replace(certain, failures=f), 1).play(40).seconds for f in (0.0, 0.6)]
    simulation = Simulation(replace(certain, failures=0.6), 1)
    lengths = []
    again = simulation._again
    simulation._again = lambda group, places: (lengths.append(group.lengths[0][0]), again(group, places))
    found = simulation.play(40)
    assert found.seconds == seconds[1] > seconds[0]
    assert len(set(lengths)) == 2 and len(lengths) == found.replayed


def test_equal_seeds_give_equal_runs():
    setup = replace(EQUAL, staleness=2, failures=0.1, lengths=np.geomspace(10, 1000, 50), mtbf_hours=1.0)
    assert Simulation(setup, 3).play(20) == Simulation(setup, 3).play(20) != Simulation(setup, 4).play(20)


def test_a_configuration_on_more_gpus():
    config = load(["experiment=qwen3_8b_fleet"])
    rows = simulate(
        config, GPUS["H100"], Workload.of(config.rollout, config.env), steps=3, failures=0.0, mtbf_hours=0.0, most=16
    )
    by = {(row.gpus, row.mode, row.staleness): row for row in rows}
    assert [(row.gpus, row.mode, row.staleness) for row in rows[:6]] == [
        (8, "colocated", 0), (8, "colocated", 1), (8, "colocated", 2), (8, "apart", 0), (8, "apart", 1),
        (8, "apart", 2),
    ]  # fmt: skip
    assert by[8, "colocated", 1].result.step_s < 0.9 * by[8, "colocated", 0].result.step_s
    assert by[8, "apart", 2].tokens_per_s > by[8, "apart", 0].tokens_per_s
    assert by[8, "apart", 0].result.staleness == 0 < by[8, "apart", 1].result.staleness <= 1


def run_folder(folder: Path, staleness: int, step_s: float, train_s: float) -> Path:
    """A run of twelve equal steps: 8 s of rollout and 1 of sync when it plays on-policy."""
    folder.mkdir()
    overrides = ["rollout.max_staleness=1", "algorithm=importance_weighted"] if staleness else []
    (folder / "config.json").write_text(dump_resolved(load(["experiment=quickstart", *overrides])))
    times = {"step": step_s, "generate": 8.0, "sync_weights": 1.0, "policy_train": train_s}
    values = {f"timing/{name}": seconds for name, seconds in times.items()}
    rows = [json.dumps({"step": step, **values}) for step in range(1, 13)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "trajectories").mkdir()
    seconds = {"seconds": 8.0, "generate_s": 8.0, "env_s": 0.0, "tool_calls": 1.0}
    episodes = [replace(trajectory(sample=sample), metrics=seconds) for sample in range(8)]
    for step in range(1, 13):
        (folder / "trajectories" / f"step_{step:06d}.parquet").write_bytes(encode(episodes))
    return folder


@pytest.mark.parametrize(("train_s", "slower"), [(6.0, "1.00"), (9.0, "1.50")])
def test_the_benchmark_plays_waiting_runs_in_their_time(tmp_path, monkeypatch, capsys, train_s, slower):
    folders = [run_folder(tmp_path / name, 0, step_s, 6.0) for name, step_s in (("one", 14.0), ("two", 16.0))]
    folders.append(run_folder(tmp_path / "ahead", 1, 9.0, train_s))
    monkeypatch.setattr(sys, "argv", ["simulator.py", *map(str, folders)])
    simulator.main()
    shared, _, *lines = capsys.readouterr().out.splitlines()
    assert shared == f"trainer and engines are {slower} times slower while both work"
    first, second = (line.split(" | ") for line in lines)
    assert first[:3] == ["waiting for every episode", "2", "15.0"] and abs(float(first[3]) / 15.0 - 1) < 0.03
    # 8 s of rollout, 6 of training and 1 of sync: the rollout is what is left to wait for. The trainer's 9 s, when both
    # are slower, are 3 more of it.
    assert second[:3] == ["staleness=1 apart", "1", "9.0"]
    assert 8.0 < float(second[3]) - 3.0 * (train_s == 9.0) < 11.0


def test_the_benchmark_needs_a_run_that_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulator.py", str(run_folder(tmp_path / "ahead", 1, 9.0, 6.0))])
    with pytest.raises(UserError, match=r"No run has rollout\.max_staleness=0"):
        simulator.main()
