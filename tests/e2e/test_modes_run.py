"""Whole runs that do not wait for their last episodes, with slow and failing environments: all is accounted for."""

from __future__ import annotations

import os

import pytest
from test_kills import Disturber
from turns import in_turn
from whole_runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

STEPS, EPISODES = 4, 16
KILLS = int(os.environ.get("MFLEET_TEST_KILLS", "4"))
MODES = {
    "goes on": (
        "rollout.engine.colocated=true", "rollout.max_staleness=1", "algorithm=importance_weighted",
    ),
    "over-sampled": ("rollout.batch.window=null", "rollout.batch.ahead=0.5", "rollout.unfinished=again"),
    "masked": (
        "rollout.engine.colocated=true", "rollout.batch.window=null", "rollout.batch.ahead=0.5",
        "rollout.too_old=mask", "algorithm=importance_weighted",
    ),
    "ahead, with replacements": (
        "rollout.max_staleness=2", "rollout.batch.window=2", "rollout.batch.max_replacements=1",
        "algorithm=importance_weighted",
    ),
}  # fmt: skip
SETTINGS = (
    f"run.steps={STEPS}", "eval=none", "checkpoint.interval=1", "rollout.max_retries=8", "env.step_timeout_s=20",
    "env.faults.latency_median_s=0.3", "env.faults.latency_sigma=1.2", "env.faults.dead_session_rate=0.05",
    "env.faults.verifier_failure_rate=0.1", "env.faults.malformed_rate=0.05", "cluster.max_restarts=20",
)  # fmt: skip
AGAIN = ("retried", "aborted", "stale", "unfinished", "replaced")


def check(run: Run, mode: str) -> None:
    """Every step has its episodes, each started one ended once, and none is older than allowed."""
    rows = [row for row in run.metrics() if "accounting/episodes" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    fates = ("trained", "filtered", "unknown", "too_few_known", "masked", "too_old", "no_tokens")
    for row in rows:
        assert sum(row[f"accounting/{fate}"] for fate in fates) == row["accounting/episodes"] == EPISODES
        again = sum(row[f"accounting/attempts_{name}"] for name in AGAIN)
        assert row["accounting/attempts_started"] - again == EPISODES
        assert row["accounting/unknown"] == 0
    bounds = [int(key.partition("=")[2]) for key in MODES[mode] if key.startswith("rollout.max_staleness")]
    if mode != "masked":
        assert max(row["async/staleness_max"] for row in rows) <= sum(bounds)
    assert (run.out / "checkpoints" / f"step_{STEPS:06d}").is_dir()


@pytest.mark.parametrize("mode", in_turn(MODES, of=len(MODES)))
def test_all_is_accounted_for(mode, tmp_path):
    run = Run(tmp_path / "run", (*SETTINGS, *MODES[mode]))
    run.finish()
    run.assert_nothing_left()
    check(run, mode)


class NoStore:
    """Nothing is uploaded."""

    requests: tuple[str, ...] = ()


@pytest.mark.nightly(minutes=4)
@pytest.mark.parametrize("mode", MODES)
def test_kills_lose_nothing(mode, tmp_path):
    """Of engines, workers, ranks, environment servers and the controller, in updates too."""
    run = Run(tmp_path / "run", (*SETTINGS, *MODES[mode]))
    disturber = Disturber(run, NoStore(), "", list(MODES).index(mode), KILLS)
    disturber.moments = ("any", "any", "save")
    disturber.finish()
    assert len(disturber.killed) == KILLS
    check(run, mode)
