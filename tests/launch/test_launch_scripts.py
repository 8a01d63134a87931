"""launch/ on real torchrun and Slurm: the controller runs once, every rank reaches it, and its status is the run's."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import namespace_hosts
import pytest
import slurm_cluster
import yaml
from namespace_hosts import ROOT, Hosts, stop
from slurm_cluster import CONTROLLER, Slurm
from stub_mfleet import GIVES_UP_S
from waiting import wait_until

TORCHRUN = ROOT / "launch" / "torchrun" / "train.sh"
SBATCH = ROOT / "launch" / "slurm" / "train.sbatch"
LAYOUT = ["experiment=quickstart", "parallel.data=2", "parallel.tensor=2"]
LIMIT_S = GIVES_UP_S / 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path(sys.prefix, "bin", "torchrun").exists(), reason="needs the engine environment"),
]
reason = namespace_hosts.why_not() or slurm_cluster.why_not()
several_hosts = pytest.mark.skipif(bool(reason), reason=reason or "")


@pytest.fixture
def environ(tmp_path) -> dict[str, str]:
    """The programs that the scripts start, with a stand-in for mfleet."""
    programs = tmp_path / "bin"
    programs.mkdir()
    stub = Path(__file__).with_name("stub_mfleet.py")
    (programs / "mfleet").write_text(f'#!/bin/sh\nexec {sys.executable} {stub} "$@"\n')
    (programs / "mfleet").chmod(0o755)
    for name in ("python", "torchrun"):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.prefix}/bin/{name} "$@"\n')
        (programs / name).chmod(0o755)
    return os.environ | {
        "MFLEET_BIN": str(programs),
        "STUB_FOLDER": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with Hosts([CONTROLLER, "n1", "n2"], visible=[tmp_path_factory.getbasetemp()]) as hosts, Slurm(hosts) as slurm:
        yield slurm


def reports(folder: Path) -> list[dict[str, Any]]:
    file = folder / "train.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def nodes(folder: Path) -> set[str]:
    """Hosts on which a node ran."""
    return set((folder / "nodes").read_text().split())


def placed(report: dict[str, Any]) -> list[tuple[int, int, int, str]]:
    assert len({rank["source"] for rank in report["ranks"]}) == 1
    return [(rank["rank"], rank["world_size"], rank["local_rank"], rank["host"]) for rank in report["ranks"]]


FOUR = [(0, 4, 0, "n1"), (1, 4, 1, "n1"), (2, 4, 0, "n2"), (3, 4, 1, "n2")]


@pytest.mark.in_turn(number=1, of=2)
def test_two_runs_of_torchrun_on_one_host_each_start_the_configured_world(environ, tmp_path):
    runs = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        own = environ | {"STUB_FOLDER": str(tmp_path / name)}
        runs.append(subprocess.Popen([TORCHRUN, *LAYOUT, "stub.world=4"], env=own, cwd=tmp_path))
    assert [run.wait(LIMIT_S) for run in runs] == [0, 0]
    for name in ("one", "other"):
        first, gathered = reports(tmp_path / name)
        assert first["overrides"] == [*LAYOUT, "cluster.ranks=external", "cluster.nodes=0"]
        assert [rank[:3] for rank in placed(gathered)] == [(i, 4, i) for i in range(4)]


def test_torchrun_tells_the_controllers_status(environ):
    command = [TORCHRUN, *LAYOUT, "stub.status=2"]
    # Its ranks, which nobody answers, would wait longer.
    assert subprocess.run(command, env=environ, timeout=LIMIT_S, check=False).returncode == 2


def test_a_signal_stops_the_controller_in_order(environ, tmp_path):
    command = [TORCHRUN, *LAYOUT, "stub.world=4", "stub.wait"]
    script = subprocess.Popen(command, env=environ)
    deadline = time.monotonic() + LIMIT_S
    while len(reports(tmp_path)) < 2:
        assert time.monotonic() < deadline and script.poll() is None
        time.sleep(0.1)
    script.send_signal(signal.SIGTERM)
    assert script.wait(LIMIT_S) == 143
    assert reports(tmp_path)[-1] == {"stopped": "SIGTERM"}


@several_hosts
@pytest.mark.in_turn(number=0, of=2)
def test_torchrun_on_two_hosts_starts_lost_ranks_again(slurm, environ, tmp_path):
    shared = environ | {"NODES": "2", "MASTER_ADDR": slurm.hosts.addresses["n1"], "MFLEET_TOKEN": "secret"}
    command = [TORCHRUN, *LAYOUT, "stub.world=4", "stub.restart"]
    scripts = [slurm.hosts.run(f"n{i + 1}", command, shared | {"NODE_RANK": str(i)}) for i in range(2)]
    try:
        assert [script.wait(LIMIT_S) for script in scripts] == [0, 0]
    finally:
        for script in scripts:
            stop(script)
    _, *gathered = reports(tmp_path)
    assert [placed(report) for report in gathered] == [FOUR, FOUR]


def test_several_hosts_need_a_token_of_the_users(environ):
    done = subprocess.run(
        [TORCHRUN, *LAYOUT], env=environ | {"NODES": "2"}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: MFLEET_TOKEN is not set")


def sbatch(slurm: Slurm, environ: dict[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Submit a batch job; the process that returned waits for its end and has its status."""
    options = ["--wait", "--nodes=2", "--ntasks-per-node=2", f"--output={folder}/job.log", f"--chdir={folder}"]
    both = environ | {"SLURM_CONF": slurm.environ["SLURM_CONF"]}
    return slurm.hosts.run(CONTROLLER, ["sbatch", *options, *arguments], both)


def final_status(slurm: Slurm, id_: str) -> int:
    """Wait until a job has ended for good; returns its exit status. `sbatch --wait` may end when it is requeued."""
    found: list[str] = []

    def ended() -> bool:
        shown = slurm.output(["scontrol", "show", "job", id_, "--oneliner"])
        found[:] = re.findall(r" JobState=(\w+) .* ExitCode=(\d+):(\d+)", shown)[0]
        return found[0] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    wait_until(ended)
    return int(found[1])


def submit(slurm: Slurm, environ: dict[str, str], folder: Path, *overrides: str) -> int:
    """Run the batch job to its end; its exit status."""
    job = sbatch(slurm, environ, folder, str(SBATCH), *overrides)
    try:
        return job.wait(LIMIT_S)
    finally:
        stop(job)


@several_hosts
@pytest.mark.in_turn(number=1, of=2)
def test_slurm_starts_the_ranks_on_all_hosts_and_lost_ones_again(slurm, environ, tmp_path):
    status = submit(slurm, environ, tmp_path, *LAYOUT, "stub.world=4", "stub.nodes=2", "stub.restart")
    assert status == 0, (tmp_path / "job.log").read_text()
    first, *gathered = reports(tmp_path)
    assert first == {"overrides": [*LAYOUT, "cluster.ranks=external", "cluster.nodes=2"], "host": "n1"}
    assert nodes(tmp_path) == {"n1", "n2"}
    assert [placed(report) for report in gathered] == [FOUR, FOUR]


@several_hosts
def test_slurm_tells_the_controllers_status(slurm, environ, tmp_path):
    assert submit(slurm, environ, tmp_path, *LAYOUT, "stub.status=2") == 2
    slurm.wait_until_idle()


def wait_for_reports(folder: Path, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while len(reports(folder)) < count:
        assert time.monotonic() < deadline, (folder / "job.log").read_text()
        time.sleep(0.1)


def of_job(slurm: Slurm, field: str) -> str:
    return slurm.output(["squeue", "--noheader", "--states=all", "--sort=-i", f"--format={field}"]).split("\n")[0]


def start_again(slurm: Slurm, id_: str) -> None:
    """Wait until a job is requeued, and start it."""

    def requeued() -> bool:
        shown = slurm.output(["scontrol", "show", "job", id_])
        return "Restarts=1" in shown and "JobState=PENDING" in shown

    wait_until(requeued)
    slurm.start_requeued(id_)


@several_hosts
def test_slurm_requeues_a_run_that_saved_and_it_must_resume(slurm, environ, tmp_path):
    job = sbatch(slurm, environ, tmp_path, str(SBATCH), *LAYOUT, "stub.world=4", "stub.wait", "stub.saves")
    try:
        wait_for_reports(tmp_path, 2)
        id_ = of_job(slurm, "%A")
        # As ahead of the time limit.
        slurm.output(["scancel", "--batch", "--signal=USR1", id_])
        start_again(slurm, id_)
        assert final_status(slurm, id_) == 0, (tmp_path / "job.log").read_text()
    finally:
        stop(job)
    starts = [report for report in reports(tmp_path) if "overrides" in report]
    assert [start["overrides"][-3] for start in starts] == [LAYOUT[-1], "run.resume=must"]
    assert {"stopped": "SIGUSR1"} in reports(tmp_path)
    slurm.wait_until_idle()


@several_hosts
def test_a_run_that_had_nothing_to_save_may_begin_again_and_not_more_often_than_allowed(slurm, environ, tmp_path):
    limited = environ | {"MFLEET_MAX_REQUEUES": "1"}
    job = sbatch(slurm, limited, tmp_path, str(SBATCH), "parallel.data=4", "stub.world=4", "stub.wait", "stub.again")
    try:
        for attempt in range(2):
            wait_for_reports(tmp_path, 3 * attempt + 2)
            id_ = of_job(slurm, "%A")
            slurm.output(["scancel", "--batch", "--signal=USR1", id_])
            if attempt == 0:
                start_again(slurm, id_)
        assert final_status(slurm, id_) == 138
    finally:
        stop(job)
    starts = [report for report in reports(tmp_path) if "overrides" in report]
    assert [start["overrides"][-3] for start in starts] == ["parallel.data=4", "run.resume=auto"]
    assert "not requeued: 1 restarts are the most" in (tmp_path / "job.log").read_text()
    slurm.wait_until_idle()


@several_hosts
def test_a_cancelled_job_saves_and_is_gone(slurm, environ, tmp_path):
    job = sbatch(slurm, environ, tmp_path, str(SBATCH), *LAYOUT, "stub.world=4", "stub.wait", "stub.saves")
    try:
        wait_for_reports(tmp_path, 2)
        slurm.output(["scancel", of_job(slurm, "%A")])
        job.wait(LIMIT_S)
    finally:
        stop(job)
    slurm.wait_until_idle()
    assert reports(tmp_path)[-1] == {"stopped": "SIGTERM"}
    assert of_job(slurm, "%T") == "CANCELLED"


@several_hosts
@pytest.mark.in_turn(number=0, of=2)
def test_an_array_takes_the_overrides_of_its_runs(slurm, environ, tmp_path):
    array = ["--array=0-2%1", "--exclusive", str(SBATCH)]
    runs = [["parallel.data=4", "stub.status=0", f"run.seed={seed}"] for seed in (5, 6, 7)]
    arguments = [text for run in runs for text in ("--next", *run)][1:]
    job = sbatch(slurm, environ, tmp_path, *array, *arguments)
    try:
        assert job.wait(LIMIT_S) == 0
    finally:
        stop(job)
    assert [report["overrides"][-3] for report in reports(tmp_path)] == ["run.seed=5", "run.seed=6", "run.seed=7"]
    slurm.wait_until_idle()


@several_hosts
@pytest.mark.in_turn(number=1, of=2)
def test_a_heterogeneous_job_has_ranks_on_its_first_component_and_engines_on_all(slurm, environ, tmp_path):
    first = ["--nodes=1", "--ntasks-per-node=2", f"--output={tmp_path}/job.log", f"--chdir={tmp_path}", "--wait"]
    second = [":", "--nodes=1", "--ntasks-per-node=1"]
    both = environ | {"SLURM_CONF": slurm.environ["SLURM_CONF"]}
    command = ["sbatch", *first, *second, SBATCH, "parallel.data=2", "stub.world=2", "stub.nodes=2"]
    job = slurm.hosts.run(CONTROLLER, command, both)
    try:
        assert job.wait(LIMIT_S) == 0, (tmp_path / "job.log").read_text()
    finally:
        stop(job)
    start, gathered = reports(tmp_path)
    assert start["overrides"][-2:] == ["cluster.ranks=external", "cluster.nodes=2"]
    assert {rank["host"] for rank in gathered["ranks"]} == {"n1"}
    assert nodes(tmp_path) == {"n1", "n2"}
    slurm.wait_until_idle()


@several_hosts
def test_with_fewer_hosts_a_job_has_their_share_of_the_replicas(slurm, environ, tmp_path):
    fewer = environ | {"MFLEET_HOSTS": "4", "MFLEET_WITH_2_HOSTS": "parallel.data=4 rollout.engine.replicas=2"}
    assert submit(slurm, fewer, tmp_path, "parallel.data=8", "stub.status=0") == 0
    assert reports(tmp_path)[0]["overrides"][-4:-2] == ["parallel.data=4", "rollout.engine.replicas=2"]
    slurm.wait_until_idle()


@several_hosts
@pytest.mark.parametrize(("nodes", "told", "ranks"), [("1-2", 2, FOUR), ("1", 0, [(0, 2, 0, "n1"), (1, 2, 1, "n1")])])
def test_a_job_with_a_range_of_hosts_has_ranks_on_all_that_it_gets(slurm, environ, tmp_path, nodes, told, ranks):
    elastic = environ | {"MFLEET_HOSTS": "2", "MFLEET_RANKS_PER_HOST": "2", "MFLEET_WITH_1_HOSTS": "parallel.data=2"}
    elastic |= {"MFLEET_DOCTOR": "1", "STUB_DOCTOR": "0", "SLURM_CONF": slurm.environ["SLURM_CONF"]}
    options = [f"--nodes={nodes}", "--cpus-per-task=2", "--wait", f"--output={tmp_path}/job.log", f"--chdir={tmp_path}"]
    stub = [f"stub.world={len(ranks)}"]
    job = slurm.hosts.run(CONTROLLER, ["sbatch", *options, str(SBATCH), "parallel.data=4", *stub], elastic)
    try:
        assert job.wait(LIMIT_S) == 0, (tmp_path / "job.log").read_text()
    finally:
        stop(job)
    start, gathered = reports(tmp_path)
    assert start["overrides"][-1] == f"cluster.nodes={told}" and placed(gathered) == ranks
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {line.split()[2] for line in asked} == {f"cluster.nodes={told}"}
    slurm.wait_until_idle()


def hosts_of_skypilot(slurm: Slurm, environ: dict[str, str], folder: Path, *overrides: str) -> list[Any]:
    """Run the task's own `run` section on two hosts, with the variables that SkyPilot sets."""
    task = yaml.safe_load((ROOT / "launch" / "skypilot" / "train.yaml").read_text())
    addresses = [slurm.hosts.addresses[name] for name in ("n1", "n2")]
    sky = {"SKYPILOT_NODE_IPS": "\n".join(addresses), "SKYPILOT_NUM_NODES": "2", "MFLEET_TOKEN": "secret"}
    sky |= {"MFLEET_ARGUMENTS": shlex.join(overrides), "RAY_ADDRESS": "127.0.0.1:6380", "MFLEET_OUT": str(folder)}
    return [
        slurm.hosts.run(
            name,
            ["bash", "-c", f"echo $$ >{folder}/{name}.pid\n{task['run']}"],
            environ | task["envs"] | sky | {"SKYPILOT_NODE_RANK": str(rank)},
            stdout=(folder / f"{name}.txt").open("w"),
        )
        for rank, name in enumerate(("n1", "n2"))
    ]


@several_hosts
@pytest.mark.parametrize("status", [0, 2, os.EX_TEMPFAIL])
def test_skypilots_run_section_ends_on_all_hosts_with_the_run(slurm, environ, tmp_path, status):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_1.log").write_text("its last words\n")
    ending = ["stub.nodes=2", "stub.wait", "stub.saves"] if status == os.EX_TEMPFAIL else ["stub.nodes=2"]
    scripts = hosts_of_skypilot(slurm, environ, tmp_path, "a=b c", *ending, f"stub.ends={status}")
    try:
        if status == os.EX_TEMPFAIL:
            wait_until(lambda: joined(tmp_path) == 2)
            for name in ("n1", "n2"):  # as the pods of a JobSet, which all end
                slurm.hosts.output(name, ["kill", "-TERM", (tmp_path / f"{name}.pid").read_text().strip()])
        assert [script.wait(LIMIT_S) for script in scripts] == [status, 0]
    finally:
        for script in scripts:
            stop(script)
    start = reports(tmp_path)[0]
    assert start["host"] == "n1" and start["overrides"] == ["a=b c", "cluster.nodes=2"]
    assert ("its last words" in (tmp_path / "n1.txt").read_text()) == (status != 0)


def joined(folder: Path) -> int:
    file = folder / "joined"
    return len(file.read_text().splitlines()) if file.exists() else 0


@several_hosts
def test_hosts_end_when_that_of_the_controller_is_lost(slurm, environ, tmp_path):
    scripts = hosts_of_skypilot(slurm, environ, tmp_path, "stub.nodes=3")
    try:
        wait_until(lambda: joined(tmp_path) == 2)
        os.killpg(scripts[0].pid, signal.SIGKILL)
        assert scripts[1].wait(LIMIT_S) == 3
    finally:
        for script in scripts:
            stop(script)


@pytest.mark.parametrize(("setup", "status"), [("exit 7", 7), ("sleep 100", 124), ("echo done >made", 0)])
def test_setting_up_a_host_has_a_deadline(tmp_path, setup, status):
    (tmp_path / "launch").mkdir()
    script = tmp_path / "launch" / "install.sh"
    script.write_bytes((ROOT / "launch" / "install.sh").read_bytes())
    (tmp_path / "setup.sh").write_text(f"#!/bin/sh\n{setup}\n")
    for file in (script, tmp_path / "setup.sh"):
        file.chmod(0o755)
    seconds = "1" if status == 124 else "100"
    done = subprocess.run([script], env=os.environ | {"INSTALL_TIMEOUT_S": seconds}, check=False, timeout=LIMIT_S)
    assert done.returncode == status and (tmp_path / "made").exists() == (status == 0)


@several_hosts
@pytest.mark.parametrize("found", [0, 1])
def test_the_doctor_goes_first_on_all_hosts(slurm, environ, tmp_path, found):
    both = environ | {"MFLEET_DOCTOR": "1", "STUB_DOCTOR": str(found)}
    assert submit(slurm, both, tmp_path, *LAYOUT, "stub.status=0") == found
    slurm.wait_until_idle()
    assert len(reports(tmp_path)) == 1 - found
    asked = (tmp_path / "asked").read_text().split("\n")[:-1]
    assert {line.split()[0] for line in asked} == {"n1", "n2"} and len({line.split()[1] for line in asked}) == 1
    (tmp_path / "asked").unlink()
    scripts = hosts_of_skypilot(slurm, both, tmp_path, "stub.nodes=2")
    try:
        assert [script.wait(LIMIT_S) for script in scripts] == [found, found]
    finally:
        for script in scripts:
            stop(script)
    assert len(reports(tmp_path)) == 3 * (1 - found)
    assert sorted(line.split()[0] for line in (tmp_path / "asked").read_text().split("\n")[:-1]) == ["n1", "n2"]
