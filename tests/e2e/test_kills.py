"""Whole runs whose processes are killed at random moments, in saves and uploads too, lose nothing and leave nothing.

The long test: ``MFLEET_TEST_KILLS=30 ./test --nightly tests/e2e/test_kills.py``. Without that variable, and in the
turns of CI, there are four kills.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from planted import MARKERS
from s3_faults import FaultyStore
from s3_server import BUCKET, s3_server
from whole_runs import Run

from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.checkpoint.store import RunStore, run_url
from megatron_fleet.storage.local import list_files

pytestmark = [pytest.mark.slow, pytest.mark.nightly(minutes=10), pytest.mark.timeout(4 * 3600)]

KILLS = int(os.environ.get("MFLEET_TEST_KILLS", "4"))
KILLS_PER_RUN = 12
LIMIT_S = 3600
STEPS = 4
OVERRIDES = (
    f"run.steps={STEPS}",
    "eval=none",
    "parallel.data=2",
    "rollout.workers=2",
    "rollout.max_retries=8",
    "cluster.max_restarts=20",
    "checkpoint.interval=1",
    "run.project=kills",
)
TURNS = ((), ("rollout.engine.colocated=true", "rollout.engine.transport=gloo"))
"""Settings of the runs by turns; in the second, a lost engine depends on the trainer for its weights."""
TARGETS = {
    "rank": "megatron_fleet.cli rank",
    "engine": "ray::EngineActor",
    "engine core": "EngineCore",
    "worker": "ray::WorkerActor",
    "environment server": "megatron_fleet.embedded_fleet.server",
}
OTHERS = ("all ranks", "verifier host", "controller")
SAVING = ("rank", "all ranks", "controller")
"""Processes that write a checkpoint; the last one sends it to the store."""
MOST = {"engine": 1, "engine core": 1, "worker": 2, "environment server": 2, "rank": 3, "all ranks": 2, "controller": 2}
"""Kills of these in a run; more of the same place within an hour end it on purpose, or make it pause for minutes."""
BY_TURNS = ("engine", "engine core")
"""One of them in each run: a lost engine is back so late that the other would rarely be there to be killed."""
LINE_BYTES_PER_S = 1 << 20
"""Of a connection to the store: files take long enough that a process can be killed meanwhile."""


def processes(run: Run, controller: int) -> dict[str, list[int]]:
    """Pids of the living processes of a run, by target."""
    found: dict[str, list[int]] = {name: [] for name in (*TARGETS, *OTHERS)}
    for folder in Path("/proc").iterdir():
        try:
            if run.mark.encode() not in (folder / "environ").read_bytes():
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
    found["all ranks"], found["controller"] = found["rank"], [controller]
    return {name: pids for name, pids in found.items() if pids}


class Disturber:
    """Kills processes of one run at moments drawn from a seed, and starts it again when that ended it.

    Attributes:
        killed: moment and name of each.
        moments: kinds of moments, drawn from.
        elsewhere: how often the run went on in an empty folder, from the store.
    """

    def __init__(self, run: Run, store: FaultyStore, url: str, seed: int, kills: int) -> None:
        self.run, self.store, self.url, self.kills = run, store, url, kills
        self.killed: list[tuple[str, str]] = []
        self.ended = self.elsewhere = 0
        self._rng = random.Random(seed)
        self._most = MOST | {BY_TURNS[seed % len(BY_TURNS)]: 0}
        self._until = time.monotonic() + LIMIT_S
        self.moments: tuple[str, ...] = ("any", "any", "save", "upload")

    def finish(self) -> None:
        """Train to the end."""
        while True:
            process = self.run.start()
            self._disturb(process)
            output, _ = process.communicate(timeout=LIMIT_S)
            self.run.assert_nothing_left()
            if process.returncode == 0:
                return
            said = output.strip().splitlines()[-1] if output.strip() else ""
            if process.returncode != -signal.SIGKILL:
                assert said.startswith("error: "), (self.killed, output[-2000:] + self.run.logs())
                print(f"ended after {self.killed} with: {said}")
                self.ended += 1  # it can be resumed
            elif self.url and self.elsewhere == 0 and RunStore(self.url).steps():
                self.run.out.rename(self.run.out.with_name(f"{self.run.out.name}-of-a-lost-machine"))
                self.elsewhere += 1

    def _disturb(self, process: subprocess.Popen[str]) -> None:
        while len(self.killed) < self.kills and process.poll() is None and time.monotonic() < self._until:
            moment = self._rng.choice(self.moments)
            self._await(moment, process)
            there = processes(self.run, process.pid)
            names = [name for name in there if self._count(name) < self._most.get(name, KILLS_PER_RUN)]
            if moment != "any":
                names = [name for name in names if name in SAVING]
            if process.poll() is not None or not names:
                continue
            fewest = min(map(self._count, names))
            name = self._rng.choice(sorted(name for name in names if self._count(name) == fewest))
            for pid in there[name] if name == "all ranks" else [self._rng.choice(sorted(there[name]))]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.killed.append((moment, name))
            if name == "controller":
                process.wait(LIMIT_S)

    def _count(self, name: str) -> int:
        return [killed for _, killed in self.killed].count(name)

    def _await(self, moment: str, process: subprocess.Popen[str]) -> None:
        """Sleep to a moment of a kind, or until the run has ended."""
        if moment == "any":
            time.sleep(self._rng.uniform(0.5, 5.0))
            return
        seen = len(self.store.requests)

        def now() -> bool:
            if moment == "save":
                return any((self.run.out / "checkpoints").glob(".step_*"))
            return any(r.startswith("PUT ") and "/global_step_" in r for r in self.store.requests[seen:])

        while not now() and process.poll() is None and time.monotonic() < self._until:
            time.sleep(0.001)
        time.sleep(self._rng.uniform(0, 0.03 if moment == "save" else 0.5))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("kills") / "undisturbed", OVERRIDES)
    run.finish()
    return run


@pytest.fixture
def store(monkeypatch):
    """A store that knows the keys that every run has."""
    with s3_server((MARKERS["AWS_ACCESS_KEY_ID"], MARKERS["AWS_SECRET_ACCESS_KEY"])) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        proxy = FaultyStore(server, LINE_BYTES_PER_S)
        yield proxy
        proxy.close()


def test_runs_survive_kills_at_many_moments(undisturbed, store, tmp_path):
    total: Counter[tuple[str, str]] = Counter()
    ended = 0
    for seed in itertools.count():
        if total.total() >= KILLS:
            break
        root = f"s3://{BUCKET}/runs"
        stored = (f"checkpoint.store.url={root}", f"run.id=kills_{seed}")
        run = Run(tmp_path / f"run{seed}", (*OVERRIDES, *TURNS[seed % len(TURNS)], *stored))
        run.environ = {"AWS_ENDPOINT_URL": store.endpoint}
        url = run_url(root, "kills", "tiny", f"kills_{seed}")
        disturber = Disturber(run, store, url, seed, min(KILLS_PER_RUN, KILLS - total.total()))
        disturber.finish()
        total.update(disturber.killed)
        ended += disturber.ended
        same_as(run, undisturbed, disturber.elsewhere > 0)
        whole_in(url, run.out / "checkpoints", tmp_path / "downloaded")
    print(sorted(total.items()))
    assert ended <= seed  # one each, on a machine so busy that something does not start in time
    assert {moment for moment, _ in total} == {"any", "save", "upload"}
    names = {name for _, name in total}
    assert names >= {*SAVING} if KILLS < 30 else names == {*TARGETS, *OTHERS}


def whole_in(url: str, here: Path, folder: Path) -> None:
    """The store has the last checkpoint as it is here, and every other one that it shows is whole."""
    found = RunStore(url)
    assert found.steps()[0] == STEPS
    for step in found.steps():
        found.download(step, folder / f"step_{step:06d}", threading.Event())
        Checkpoint.open(folder / f"step_{step:06d}").verify()
    last, copy = here / f"step_{STEPS:06d}", folder / f"step_{STEPS:06d}"
    assert [path.name for path in list_files(copy)] == [path.name for path in list_files(last)]
    for file in list_files(last):
        assert (copy / file.relative_to(last)).read_bytes() == file.read_bytes(), file.name


def same_as(run: Run, undisturbed: Run, elsewhere: bool) -> None:
    """Equal episodes and weights to the last bit, and counts that add up.

    Args:
        elsewhere: whether the run lost its folder meanwhile, with the trajectories of its first steps.
    """
    for row in run.metrics():
        if "accounting/episodes" not in row:
            continue
        fates = ("trained", "filtered", "unknown", "too_few_known", "masked", "too_old", "no_tokens")
        assert sum(row[f"accounting/{fate}"] for fate in fates) == row["accounting/episodes"] == 16
        assert row["accounting/unknown"] == 0
        attempts = [row[f"accounting/attempts_{name}"] for name in ("started", "retried", "aborted", "stale")]
        assert attempts[0] - sum(attempts[1:]) == 16
    played = sorted(path.stem for path in (run.out / "trajectories").glob("step_*.parquet"))
    assert played[-1] == f"step_{STEPS:06d}" and (elsewhere or len(played) == STEPS)
    for step in played:
        for one, two in zip(run.arrays(step), undisturbed.arrays(step), strict=True):
            assert all(np.array_equal(one[name], two[name]) for name in one), step
    weights = Path("hf/model.safetensors")
    assert (run.out / weights).read_bytes() == (undisturbed.out / weights).read_bytes()
    assert json.loads((run.out / "summary.json").read_text())["steps"] == STEPS
