"""`mfleet launch cluster=slurm`: whole runs on a real Slurm of two hosts; time limit, loss of a host, cancelling."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import namespace_hosts
import pytest
import slurm_cluster
from namespace_hosts import Hosts, stop
from slurm_cluster import CONTROLLER, Slurm
from test_hosts_run import MFLEET, RUN_S, SMALL, assert_nothing_left, environ, tail
from waiting import wait_until

reason = namespace_hosts.why_not() or slurm_cluster.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly(minutes=3),
    pytest.mark.skipif(not Path(sys.prefix, "bin", "torchrun").exists(), reason="needs the engine environment"),
    pytest.mark.skipif(bool(reason), reason=reason or ""),
]
LAUNCH = (
    "cluster=slurm",
    "cluster.nodes=2",
    "launch.gpus=0",
    "launch.slurm.exclusive=false",
    "launch.slurm.time=10:00:00",
)


@pytest.fixture
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with Hosts([CONTROLLER, "n1", "n2"], visible=[tmp_path_factory.getbasetemp()]) as hosts, Slurm(hosts) as slurm:
        yield slurm


class Launched:
    """A job that `mfleet launch` has submitted and follows."""

    def __init__(self, slurm: Slurm, out: Path, *words: str) -> None:
        self._slurm, self.out, self._said = slurm, out, out.with_name("said.txt")
        self._environ = environ(slurm.hosts, out) | {"SLURM_CONF": slurm.environ["SLURM_CONF"]}
        with self._said.open("w") as said:
            self._follower = self._mfleet(*SMALL, *LAUNCH, *words, "--out", str(out), stdout=said)

    def _mfleet(self, *words: str, **options: object) -> subprocess.Popen[str]:
        command = [MFLEET, "launch", *words]
        return self._slurm.hosts.run(CONTROLLER, command, self._environ, stderr=subprocess.STDOUT, **options)

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self._follower)

    @property
    def job(self) -> str:
        return json.loads((self.out / "launch" / "job.json").read_text())["ids"][0]

    def steps(self) -> list[int]:
        file = self.out / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [row["step"] for row in rows if "policy/grad_norm" in row]

    def said(self) -> str:
        return self._said.read_text()

    def until(self, true: Callable[[], object], limit_s: float = RUN_S) -> None:
        """Wait until something is true; fail when the job has ended before."""
        while not true():
            if limit_s <= 0 or self._follower.poll() is not None:
                pytest.fail(f"{self.said()}\n{tail(self.out)}")
            limit_s -= 1
            try:
                self._follower.wait(1)
            except subprocess.TimeoutExpired:
                continue

    def end(self) -> int:
        """Wait for the end; the exit status of the follower."""
        status = self._follower.wait(RUN_S)
        assert "Traceback" not in self.said(), self.said()
        return status

    def start_again(self) -> None:
        """Wait until the job is requeued; start it with its old time limit."""
        self.until(lambda: re.search(r"JobState=PENDING.* Restarts=1 ", self._shown()))
        self._slurm.start_requeued(self.job, "TimeLimit=600")

    def _shown(self) -> str:
        return self._slurm.output(["scontrol", "show", "job", self.job, "--oneliner"])

    def cancel(self) -> None:
        process = self._mfleet("--cancel", str(self.out))
        assert process.wait(RUN_S) == 0


def test_a_run_saves_before_its_time_limit_is_requeued_resumes_and_completes(slurm, tmp_path):
    with Launched(slurm, tmp_path / "out", "run.steps=12", "launch.slurm.signal_s=3600") as launched:
        launched.until(lambda: len(launched.steps()) >= 2)
        # An hour is left, which is when it is to be asked.
        slurm.output(["scontrol", "update", f"JobId={launched.job}", "TimeLimit=60"])
        launched.start_again()
        first = launched.steps()
        assert first == list(range(1, len(first) + 1)) and len(first) < 12
        assert launched.end() == 0, launched.said() + tail(launched.out)
    assert f"stopped by SIGUSR1; the same command resumes from step {len(first)}" in launched.said()
    assert "mfleet: requeued (restart 1 of at most 20)" in launched.said()
    assert launched.steps() == list(range(1, 13))
    assert json.loads((launched.out / "summary.json").read_text())["steps"] == 12
    logs = {path.name for path in (launched.out / "logs").iterdir()}
    assert logs >= {"rank_0.log", "rank_1.log", "engine-0.log", "engine-1.log", "node-n2.log"}
    slurm.wait_until_idle()
    assert_nothing_left(launched.out)


def test_a_run_goes_on_with_the_hosts_that_are_left_and_leaves_nothing_when_cancelled(slurm, tmp_path):
    words = ["run.steps=100", "checkpoint.interval=1", "launch.min_hosts=1"]
    with Launched(slurm, tmp_path / "out", *words) as launched:
        launched.until(lambda: any((launched.out / "checkpoints").glob("step_*2/manifest.json")))
        slurm.hosts.power_off("n2")
        launched.start_again()
        done = launched.steps()[-1]
        launched.until(lambda: launched.steps()[-1] >= done + 2)
        launched.cancel()
        assert launched.end() != 0
    assert "cancelled" in launched.said()
    config = json.loads((launched.out / "config.json").read_text())
    assert config["parallel"]["data"] == 1 and config["rollout"]["engine"]["replicas"] == 1
    assert config["cluster"]["nodes"] == 0
    wait_until(lambda: "JobState=CANCELLED" in slurm.output(["scontrol", "show", "job", launched.job]))
    assert_nothing_left(launched.out)
