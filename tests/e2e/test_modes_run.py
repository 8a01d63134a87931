"""Whole runs that do not wait for their last episodes, with slow and failing environments: all is accounted for."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import psutil
import pytest
from test_kills import Disturber, processes
from turns import in_turn
from whole_runs import RUN_TIMEOUT_S, Run, wait_for

from megatron_fleet.telemetry.status import read_status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

STEPS, EPISODES = 4, 16
KILLS = int(os.environ.get("MFLEET_TEST_KILLS", "4"))
UPDATES, EARLY, LATE = 100, range(25, 40), range(85, 100)
"""Updates of the long run, and the steps of it that are compared."""
MODES = {
    "continue": (
        "rollout.engine.colocated=true", "rollout.max_staleness=1", "algorithm=importance_weighted",
        "eval.at_start=true", "eval.interval=1", "eval.at_end=true", "eval.overlap=true",
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
    if "eval.overlap=true" in MODES[mode]:
        evaluated = [row["step"] for row in run.metrics() if row.get("eval/all/episodes")]
        assert evaluated == list(range(STEPS + 1))
    assert (run.out / "checkpoints" / f"step_{STEPS:06d}").is_dir()


@pytest.mark.parametrize("mode", in_turn(MODES, of=len(MODES)))
def test_all_is_accounted_for(mode, tmp_path):
    run = Run(tmp_path / "run", (*SETTINGS, *MODES[mode]))
    run.finish()
    run.assert_nothing_left()
    check(run, mode)


@pytest.mark.in_turn(number=0, of=2)
def test_evaluation_engines_score_what_an_evaluation_between_the_steps_scores(tmp_path):
    """Both sample the same episodes with the same weights; so does training, which goes on meanwhile."""
    runs = {}
    for engines in (0, 1):
        # Many times the episodes of a step: training is some steps further when it ends.
        schedule = ("eval.at_start=true", "eval.interval=3", "eval.at_end=false", "eval.samples=96", "eval.greedy=true")
        settings = (f"run.steps={STEPS}", *schedule, "run.deterministic=true", f"eval.engines={engines}")
        runs[engines] = Run(tmp_path / str(engines), settings)
        runs[engines].finish()
        runs[engines].assert_nothing_left()
    between, own = (
        [{k: v for k, v in row.items() if not k.startswith("eval/lag")} for row in run.facts()] for run in runs.values()
    )
    assert own == between
    assert [row["step"] for row in own if "eval/all/episodes" in row] == [0, 3]
    for name in ("eval_000000", "greedy_000000", "eval_000003", "greedy_000003"):
        for one, other in zip(runs[0].arrays(name), runs[1].arrays(name), strict=True):
            assert all((one[key] == other[key]).all() for key in one)
    lags = {row["step"]: row["eval/lag_steps"] for row in runs[1].metrics() if "eval/lag_steps" in row}
    assert list(lags) == [0, 3] and lags[0] >= 1
    assert (runs[1].out / "logs" / "eval-engine-0.log").stat().st_size
    status = read_status(runs[1].out)
    assert status is not None and status.state == "finished"


def is_evaluating(run: Run) -> bool:
    status = read_status(run.out) if run.out.exists() else None
    return status is not None and any(one.name.startswith("evaluation") and one.running for one in status.engines)


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("auto", marks=pytest.mark.in_turn(number=1, of=4)),
        pytest.param("gloo", marks=pytest.mark.in_turn(number=3, of=4)),
    ],
)
def test_an_evaluation_engine_that_is_killed_costs_training_nothing(transport, tmp_path):
    """Its evaluation is played again with the same weights, or with those of a later step."""
    schedule = ("eval.at_start=true", "eval.interval=3", "eval.at_end=true", "eval.samples=24")
    run = Run(
        tmp_path / "run", (f"run.steps={STEPS}", *schedule, "eval.engines=1", f"rollout.engine.transport={transport}")
    )
    process = run.start()
    wait_for(lambda: is_evaluating(run), process)
    log = str(run.out / "logs" / "eval-engine-0.log")
    there = [pid for pid in processes(run, process.pid)["engine"] if os.readlink(f"/proc/{pid}/fd/1") == log]
    assert len(there) == 1
    os.kill(there[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    assert process.returncode == 0, output[-3000:] + run.logs()
    run.assert_nothing_left()
    assert "evaluation engine 0 is lost" in output
    rows = run.metrics()
    assert [row["step"] for row in rows if "accounting/episodes" in row] == list(range(1, STEPS + 1))
    evaluated = [row["step"] for row in rows if row.get("eval/all/episodes")]
    assert evaluated[-1] == STEPS  # by the engines of the rollout; the lost one may not be back before
    assert (0 in evaluated) != ("the evaluation of step 0 could not be made" in output)


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


def held(run: Run) -> dict[str, float]:
    """Memory (bytes), open files, connections and processes of a run, and bytes of shared memory of this machine."""
    found: dict[str, float] = defaultdict(float)
    found["shared memory"] = shutil.disk_usage("/dev/shm").used
    for line in run.processes():
        try:
            process = psutil.Process(int(line.split()[0]))
            found["memory"] += process.memory_full_info().uss
            found["files"] += process.num_fds()
            found["connections"] += len(process.net_connections())
            found["processes"] += 1
        except psutil.Error:
            continue
    return found


@pytest.mark.nightly(minutes=15)
def test_a_hundred_updates_with_unfinished_episodes_leave_nothing_behind(tmp_path):
    """Environments that are not closed would keep connections, sessions in the server's memory, and files."""
    long = (f"run.steps={UPDATES}", "checkpoint.interval=50", "rollout.prompts_per_step=2", "logging.tensorboard=false")
    # The cache's memory is taken page by page, until all of it has been used once: a small one soon has.
    long += ("rollout.batch.window=null", "eval.interval=10", f"rollout.engine.kv_cache_bytes={64 << 20}")
    run = Run(tmp_path / "run", (*SETTINGS, *MODES["continue"], *long))
    process, samples = run.start(), defaultdict(list)
    reading = ThreadPoolExecutor(1).submit(process.communicate)
    while process.poll() is None:
        status = read_status(run.out) if run.out.exists() else None
        if status is not None and status.step_began is not None:
            for name, value in held(run).items():
                samples[name, status.step].append(value)
        time.sleep(0.5)
    assert process.returncode == 0, reading.result()[0][-3000:] + run.logs()
    rows = [row for row in run.metrics() if "accounting/episodes" in row]
    assert sum(row["async/unfinished_groups"] for row in rows) > UPDATES
    means = {
        name: [median(value for step in steps for value in samples[name, step]) for steps in (EARLY, LATE)]
        for name in ("memory", "files", "connections", "processes", "shared memory")
    }
    assert all(late <= 1.05 * early for early, late in means.values()), means
