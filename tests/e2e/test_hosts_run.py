"""Whole runs over two hosts: ranks, engines and workers on both, started by `mfleet node` and torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import namespace_hosts
import pytest
from namespace_hosts import ROOT, Hosts, stop
from test_modes_run import AGAIN
from waiting import wait_until

reason = namespace_hosts.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(sys.prefix, "bin", "torchrun").exists(), reason="needs the engine environment"),
    pytest.mark.skipif(bool(reason), reason=reason or ""),
]

MFLEET = Path(sys.prefix, "bin", "mfleet")
SMALL = (
    "experiment=quickstart",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.workers=2",
    "rollout.engine.replicas=2",
    "parallel.data=2",
    "policy.threads=1",
    "eval=none",
)
RUN_S = 1800.0
HELD_S = 20.0
"""Longer than a step, and shorter than an engine may be silent (rollout.engine.health_timeout_s)."""
EXACT = 1e-5
"""Relative: the sum over ranks may be taken in another order."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    with Hosts(["n1", "n2"], visible=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(hosts, tmp_path_factory) -> float:
    """The gradient norm of the first step of a run on one host."""
    out = tmp_path_factory.mktemp("alone")
    fewer = ["run.steps=1", "rollout.workers=1", "rollout.engine.replicas=1"]
    hosts.output("n1", [MFLEET, "train", *SMALL, *fewer, "--out", out], environ(hosts, out), RUN_S)
    return norms(out)[0]


def environ(hosts: Hosts, out: Path) -> dict[str, str]:
    """Environment variables of one run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MFLEET_", "RAY_"))}
    where = {"MFLEET_CONTROLLER": f"{hosts.addresses['n1']}:29600", "MFLEET_TOKEN": "only this run knows it"}
    return kept | where | {"OMP_NUM_THREADS": "1", "MFLEET_TEST_MARK": str(out)}


def norms(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["policy/grad_norm"] for row in rows if "policy/grad_norm" in row]


def assert_nothing_left(out: Path) -> None:
    wait_until(lambda: not living(out))


def living(out: Path) -> list[str]:
    """Command lines of living processes, on whatever host, that have the run's mark."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if f"MFLEET_TEST_MARK={out}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return found


def tail(out: Path) -> str:
    """The ends of all logs, for a failed test."""
    return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted((out / "logs").glob("*.log")))


class Processes:
    """Commands on hosts, of which the first is the controller. Ends all of them on leaving the ``with`` block."""

    def __init__(self, hosts: Hosts, out: Path) -> None:
        self._hosts, self._out = hosts, out
        self._environ = environ(hosts, out)
        self._started: list[tuple[str, subprocess.Popen[str], Path]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for _, process, _ in self._started:
            stop(process)

    def start(self, name: str, host: str, command: Sequence[str | Path], **variables: str) -> None:
        said = self._out / f"{name}.txt"
        with said.open("w") as file:
            process = self._hosts.run(host, command, self._environ | variables, stdout=file, stderr=subprocess.STDOUT)
        self._started.append((name, process, said))

    def forget(self, name: str) -> None:
        """A process that has ended badly, as it should."""
        (lost,) = (entry for entry in self._started if entry[0] == name)
        stop(lost[1])
        self._started.remove(lost)

    def finish(self, until: Callable[[], bool] | None = None) -> None:
        """Wait until all have ended well, or until something is true while they run."""
        deadline = time.monotonic() + RUN_S
        while until is None or not until():
            states = {name: process.poll() for name, process, _ in self._started}
            if until is None and set(states.values()) == {0}:
                return
            failed = [name for name, status in states.items() if status]
            if failed or time.monotonic() > deadline:
                said = "\n".join(f"--- {name}: {states[name]}\n{file.read_text()}" for name, _, file in self._started)
                pytest.fail(f"{failed or 'not done in time'}\n{said}\n{tail(self._out)}")
            time.sleep(0.1)


def actors_on(hosts: Hosts, host: str) -> dict[str, int]:
    """Pids of engines and episode workers on that host, by the names of their logs."""
    logs = "for p in /proc/[0-9]*; do echo $p $(readlink $p/fd/1); done"
    said = hosts.output(host, ["sh", "-c", logs])
    return {name: int(pid) for pid, name in re.findall(r"^/proc/(\d+) .*/((?:engine|worker)-\d+)\.log$", said, re.M)}


def logged(out: Path) -> set[str]:
    return {path.name for path in (out / "logs").iterdir()}


@pytest.mark.nightly(minutes=2)
def test_nodes_start_ranks_and_engines_on_both_hosts_and_a_lost_host_comes_back(hosts, tmp_path):
    with Processes(hosts, tmp_path) as processes:
        changes = ["run.steps=3", "cluster.nodes=2", "checkpoint.interval=1"]
        processes.start("train", "n1", [MFLEET, "train", *SMALL, *changes, "--out", tmp_path])
        for host in ("n1", "n2"):
            processes.start(f"node-{host}", host, [MFLEET, "node"])
        saved = tmp_path / "checkpoints"
        processes.finish(until=lambda: saved.exists() and any(saved.glob("step_*/manifest.json")))
        assert actors_on(hosts, "n1").keys() == {"engine-0", "worker-0"}
        assert actors_on(hosts, "n2").keys() == {"engine-1", "worker-1"}
        hosts.power_off("n2")
        processes.forget("node-n2")
        hosts.power_on("n2")
        processes.start("node-n2-again", "n2", [MFLEET, "node"])
        processes.finish()
    assert len(norms(tmp_path)) == 3
    names = {f"{kind}.log" for kind in ("rank_0", "rank_1", "engine-0", "engine-1", "worker-0", "worker-1", "node-n2")}
    assert names <= logged(tmp_path)
    said = (tmp_path / "train.txt").read_text()
    assert "the trainer is back" in said and "engine 1 is back" in said
    assert "weights by gloo" in (tmp_path / "logs" / "placement.txt").read_text()  # which auto has chosen
    assert_nothing_left(tmp_path)


@pytest.mark.nightly(minutes=2)
def test_torchrun_on_two_hosts_with_weights_by_disk(hosts, alone, tmp_path):
    command = [ROOT / "launch" / "torchrun" / "train.sh", *SMALL, "run.steps=2", "--out", tmp_path]
    command += ["rollout.engine.transport=disk"]
    shared = {"NODES": "2", "MASTER_ADDR": hosts.addresses["n1"]}
    with Processes(hosts, tmp_path) as processes:
        for rank, host in enumerate(("n1", "n2")):
            processes.start(f"torchrun-{host}", host, command, **shared, NODE_RANK=str(rank))
        processes.finish()
    assert norms(tmp_path)[0] == pytest.approx(alone, rel=EXACT)
    assert {"rank_0.log", "rank_1.log", "engine-0.log", "engine-1.log", "node-n2.log"} <= logged(tmp_path)
    assert_nothing_left(tmp_path)


@pytest.fixture(scope="module")
def four_hosts(tmp_path_factory) -> Iterator[Hosts]:
    with Hosts(["n1", "n2", "n3", "n4"], visible=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts


def rows(out: Path) -> list[dict[str, float]]:
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def busy(out: Path, engine: str) -> bool:
    """Whether an engine computes requests now."""
    status = json.loads((out / "status.json").read_text()) if (out / "status.json").exists() else {"engines": []}
    return any(one["name"] == engine and one["running"] > 0 for one in status["engines"])


@pytest.mark.nightly(minutes=5)
def test_hosts_with_engines_only_join_are_killed_and_leave_while_the_run_goes_on(four_hosts, tmp_path):
    hosts, alone = four_hosts, [MFLEET, "node", "--rollout-only"]
    changes = ["run.steps=200", "cluster.nodes=2", "parallel.data=1", "rollout.samples_per_prompt=8"]
    changes += ["rollout.engine.replicas=auto", "rollout.engine.colocated=false"]
    with Processes(hosts, tmp_path) as processes:
        said = tmp_path / "train.txt"

        def serves(number: int) -> bool:
            return re.search(rf"engine {number} on \S+ serves", said.read_text()) is not None

        def aborted() -> float:
            return sum(row.get("accounting/attempts_aborted", 0.0) for row in rows(tmp_path))

        def more_steps(count: int) -> Callable[[], bool]:
            before = len(rows(tmp_path))
            return lambda: len(rows(tmp_path)) >= before + count

        processes.start("train", "n1", [MFLEET, "train", *SMALL, *changes, "--out", tmp_path])
        for host in ("n1", "n2"):
            processes.start(f"node-{host}", host, [MFLEET, "node"])
        processes.start("node-n3", "n3", alone)
        processes.finish(until=lambda: serves(2) and busy(tmp_path, "engine 2"))
        before = aborted()
        hosts.output("n3", ["pkill", "-STOP", "-f", "EngineCore"])
        time.sleep(HELD_S)  # until episodes wait for it
        hosts.power_off("n3")
        processes.forget("node-n3")
        processes.start("node-n4", "n4", alone)
        processes.finish(until=lambda: "engine 2 on" in said.read_text() and "has left" in said.read_text())
        processes.finish(until=lambda: serves(3))
        processes.finish(until=more_steps(2))
        assert aborted() > before  # the episodes of the killed host's engine were counted and played again
        counted = aborted()
        processes.finish(until=lambda: busy(tmp_path, "engine 3"))
        (leaving,) = (process for name, process, _ in processes._started if name == "node-n4")
        hosts.output("n4", ["pkill", "-TERM", "-f", "[m]fleet node --rollout-only"])
        processes.finish(until=lambda: leaving.poll() == 0)
        processes.finish(until=more_steps(2))
        assert aborted() == counted  # requests of a host that leaves are finished by others
        engines = [row["engine/engines"] for row in rows(tmp_path) if "engine/engines" in row]
        assert max(engines) == 3 and engines[-1] == 2
        for row in rows(tmp_path):
            again = sum(row[f"accounting/attempts_{name}"] for name in AGAIN)
            assert row["accounting/attempts_started"] - again == row["accounting/episodes"] == 4 * 8
            assert row["accounting/unknown"] == 0
    assert_nothing_left(tmp_path)
