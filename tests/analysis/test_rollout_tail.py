"""The report's section on what steps wait for."""

from __future__ import annotations

from run_maker import episode

from megatron_fleet.analysis.rollout_tail import rollout_tail
from megatron_fleet.analysis.selection import times_of

FULL = {
    "async/trainer_waits_share": 0.5,
    "async/engines_idle_share": 0.25,
    "async/unfinished_groups": 2,
    "async/interrupted_episodes": 3,
    "async/recomputed_tokens": 1000,
    "async/overtaking_share": 0.5,
    "accounting/attempts_stale": 1,
    "accounting/attempts_unfinished": 4,
    "accounting/attempts_replaced": 0,
}


def one(env, step, seconds, sampling=1.0, kind="step", task="t"):
    return episode(kind=kind, env=env, step=step, task=task, metrics={"seconds": seconds, "generate_s": sampling})


def test_waiting_is_summed_up_over_the_steps():
    rows = [FULL | {"async/length_ratio": ratio} for ratio in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    (facts,) = rollout_tail(rows, []).blocks
    assert [(f.label, f.value) for f in facts.facts] == [
        ("training waits for episodes", "50 %"),
        ("groups unfinished at an update", "2.0"),
        ("episodes played again", "30"),
        ("length of trained episodes", "0.70 → 0.80"),
    ]
    assert facts.facts[2].detail == "6 older than rollout.max_staleness, 24 stopped when the batch was full"
    assert "18 episodes were interrupted, 6,000 tokens" in facts.facts[1].detail


def test_a_run_that_waits_for_every_group_has_no_figures_of_groups_that_play_on():
    rows = [dict.fromkeys(FULL, 0) | {"async/trainer_waits_share": 0.9, "async/length_ratio": 1.0}]
    (facts,) = rollout_tail(rows, []).blocks
    assert [f.label for f in facts.facts] == ["training waits for episodes"]
    assert [block.kind for block in rollout_tail([], []).blocks] == ["text"]


def test_environments_whose_episodes_end_last_come_first():
    slow = [one("maps", 1, 10.0, 2.0, task="far"), one("maps", 2, 3.0), one("maps", 2, 9.0)]
    quick = [one("shop", 1, 2.0), one("shop", 2, 4.0), one("shop", 1, 99.0, kind="eval"), episode(kind="step")]
    _, table = rollout_tail([], times_of([*quick, *slow])).blocks
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["maps", "2 of 2", "9.0", "9.8", "10.0", "82 %", "3"],
        ["shop", "0 of 2", "3.0", "3.8", "4.0", "67 %", "2"],
    ]
    assert table.rows[0][4].title == "far, step 1"
