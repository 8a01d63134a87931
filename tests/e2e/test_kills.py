"""Whole runs whose processes are killed at random moments end by themselves, with nothing lost and nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from whole_runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

KILLS_PER_RUN, KILLS, MOST_RUNS = 12, 40, 8
LIMIT_S = 3600
OVERRIDES = (
    "run.steps=4",
    "eval=none",
    "parallel.data=2",
    "rollout.workers=2",
    "rollout.max_retries=8",
    "cluster.max_restarts=20",
    "checkpoint.interval=1",
)
TURNS = ((), (), ("rollout.engine.colocated=true", "rollout.engine.transport=gloo"))
"""Settings of the runs by turns; in the last, a lost engine depends on the trainer for its weights."""
TARGETS = {
    "rank": "megatron_fleet.cli rank",
    "engine": "ray::EngineActor",
    "engine core": "EngineCore",
    "worker": "ray::WorkerActor",
    "environment server": "megatron_fleet.embedded_fleet.server",
}
OTHERS = ("all ranks", "verifier host")
MOST = {"engine": 1, "engine core": 1, "worker": 2, "environment server": 2, "rank": 3, "all ranks": 2}
"""Kills of these in a run; more of the same place within an hour end it on purpose, or make it pause for minutes."""
BY_TURNS = ("engine", "engine core")
"""One of them in each run: a lost engine is back so late that the other would rarely be there to be killed."""


def processes(mark: str) -> dict[str, list[int]]:
    """Pids of the living processes of a run, by target."""
    found: dict[str, list[int]] = {name: [] for name in (*TARGETS, *OTHERS)}
    for folder in Path("/proc").iterdir():
        try:
            if mark.encode() not in (folder / "environ").read_bytes():
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        for name, part in TARGETS.items():
            if part in command:
                found[name].append(int(folder.name))
                break
    # Its environment is empty: it is known by its parent.
    servers = [psutil.Process(pid) for pid in found["environment server"] if psutil.pid_exists(pid)]
    with contextlib.suppress(psutil.Error):
        found["verifier host"] = [child.pid for server in servers for child in server.children()]
    found["all ranks"] = found["rank"]
    return found


def kill_at_random(run: Run, process: subprocess.Popen[str], seed: int) -> list[str]:
    """Kill processes of ``run`` until enough were killed or it ended; what was killed."""
    rng, killed, deadline = random.Random(seed), [], time.monotonic() + LIMIT_S
    most = MOST | {BY_TURNS[seed % len(BY_TURNS)]: 0}
    while len(killed) < KILLS_PER_RUN and process.poll() is None and time.monotonic() < deadline:
        time.sleep(rng.uniform(0.5, 5.0))
        there = {name: pids for name, pids in processes(run.mark).items() if pids}
        allowed = [name for name in there if killed.count(name) < most.get(name, KILLS_PER_RUN)]
        spared = {name for name in (*TARGETS, *OTHERS) if name not in killed and most.get(name, KILLS_PER_RUN)}
        if KILLS_PER_RUN - len(killed) <= len(spared):
            allowed = [name for name in allowed if name in spared]  # an engine may take long to start
        if not allowed:
            continue
        name = rng.choice(sorted(allowed))
        pids = there[name]
        for pid in pids if name == "all ranks" else [rng.choice(sorted(pids))]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        killed.append(name)
    return killed


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("kills") / "undisturbed", OVERRIDES)
    run.finish()
    return run


def test_runs_survive_kills_at_many_moments(undisturbed, tmp_path):
    total, ended = [], 0
    for seed in range(MOST_RUNS):
        if len(total) >= KILLS and seed >= len(TURNS):
            break
        run = Run(tmp_path / f"run{seed}", OVERRIDES + TURNS[seed % len(TURNS)])
        process = run.start()
        killed = kill_at_random(run, process, seed)
        output, _ = process.communicate(timeout=LIMIT_S)
        total += killed
        said = output.strip().splitlines()[-1]
        run.assert_nothing_left()
        assert process.returncode == 0 or said.startswith("error: "), (seed, killed, output[-2000:] + run.logs())
        if process.returncode:
            print(f"seed {seed}: ended after {killed} with: {said}")
            run.finish()  # it can be resumed
        ended += process.returncode != 0
        same_as(run, undisturbed)
    assert len(total) >= KILLS and ended <= 1, (ended, total)
    assert set(total) == {*TARGETS, *OTHERS}


def same_as(run: Run, undisturbed: Run) -> None:
    """Equal episodes and weights to the last bit, and counts that add up."""
    for row in run.metrics():
        if "accounting/episodes" not in row:
            continue
        fates = ("trained", "filtered", "unknown", "too_few_known", "masked", "no_tokens")
        assert sum(row[f"accounting/{fate}"] for fate in fates) == row["accounting/episodes"] == 16
        assert row["accounting/unknown"] == 0
        attempts = [row[f"accounting/attempts_{name}"] for name in ("started", "retried", "aborted", "stale")]
        assert attempts[0] - sum(attempts[1:]) == 16
    for step in range(1, 5):
        for one, two in zip(run.arrays(f"step_{step:06d}"), undisturbed.arrays(f"step_{step:06d}"), strict=True):
            assert all(np.array_equal(one[name], two[name]) for name in one), f"step {step}"
    weights = Path("hf/model.safetensors")
    assert (run.out / weights).read_bytes() == (undisturbed.out / weights).read_bytes()
    assert json.loads((run.out / "summary.json").read_text())["steps"] == 4
