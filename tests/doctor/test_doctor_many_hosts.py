"""Several hosts that run `mfleet doctor` meet: clocks, all-reduce, one table and one verdict for all."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest
from held_ports import held_ports
from namespace_hosts import Hosts, stop, why_not
from waiting import HANG_S

pytest.importorskip("hydra")

from megatron_fleet.cluster import frames, handshake
from megatron_fleet.cluster.inventory import Host
from megatron_fleet.cluster.joined_nodes import host_to_plain
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.doctor import doctor_command, many_hosts, network
from megatron_fleet.doctor.many_hosts import Meeting, follow, hosts_of
from megatron_fleet.doctor.probe import Finding, Probe, ProbeContext, Result

TOKEN = "a secret of the run"
PROBES = (Probe("lamp", lambda here: Result("failed" if here.host.name == "dark" else "ok", "seen", "switch it on")),)


@pytest.fixture
def environ(monkeypatch):
    """MFLEET_CONTROLLER at a free port; all-reduce is what `network.exchange` is replaced by."""
    monkeypatch.setattr(many_hosts, "DIAL_INTERVAL_S", 0.01)
    monkeypatch.setattr(network, "exchange", lambda host, *_: {"gloo": 2e9 if host.name == "first" else 1e9})
    with held_ports(1) as (port,):
        yield {"MFLEET_CONTROLLER": f"127.0.0.1:{port}", "MFLEET_TOKEN": TOKEN}


def here(name: str, environ: dict[str, str]) -> ProbeContext:
    return ProbeContext(None, environ, Host(name, "127.0.0.1"))


async def host_with_clock(environ: dict[str, str], ahead_s: float) -> None:
    """Meet as a host whose clock is wrong and whose probes find nothing."""
    reader, writer = await many_hosts._dial(environ["MFLEET_CONTROLLER"], HANG_S)
    writer.write(
        frames.pack("doctor", await handshake.dial(reader, writer, TOKEN), host_to_plain(Host("late", "127.0.0.1")))
    )
    while (frame := await frames.read(reader)) is not None:
        answers = {
            "clock": ("clock", time.time() + ahead_s),
            "exchange": ("exchanged", {"gloo": 1e9}),
            "probe": ("found", []),
        }
        if frame[0] == "verdict":
            break
        writer.write(frames.pack(*answers[frame[0]]))
    writer.close()


async def met(environ: dict[str, str], *others, timeout_s: float = HANG_S) -> tuple[list[Finding], list[int]]:
    """Run a meeting; returns the findings of the first host and the exit statuses sent to the others."""
    first = Meeting(here("first", environ), PROBES, 1 + len(others), timeout_s)
    found, *told = await asyncio.gather(first.run(), *others)
    return found, told


def of(findings: list[Finding], name: str) -> Result:
    (result,) = (finding.result for finding in findings if finding.name == name)
    return result


async def test_hosts_meet_and_all_hear_the_verdict(environ):
    others = [follow(here(name, environ), PROBES, HANG_S) for name in ("bright", "dark")]
    findings, told = await met(environ, *others)
    assert told == [1, 1]
    assert of(findings, "hosts").status == "ok" and of(findings, "hosts").detail.startswith("3 of 3 have met: first, ")
    assert of(findings, "clock").status == "ok"
    assert of(findings, "all-reduce") == Result("ok", "3 processes: gloo 1.00 GB/s")  # that of the slowest
    assert {f.host: f.result.status for f in findings if f.name == "lamp"} == {
        "first": "ok",
        "bright": "ok",
        "dark": "failed",
    }
    text = doctor_command.table(findings)
    rows = [line.split() for line in text.splitlines()]
    assert ["lamp", "2", "hosts", "ok", "seen", "switch", "it", "on"] in rows
    assert ["lamp", "dark", "failed", "seen", "switch", "it", "on"] in rows
    assert text.endswith("1 failed, 0 warnings, 5 ok: a run would not work")


@pytest.mark.parametrize(("ahead_s", "status"), [(-0.01, "ok"), (2.0, "warning"), (-90.0, "failed")])
async def test_a_wrong_clock(environ, ahead_s, status):
    findings, _ = await met(environ, host_with_clock(environ, ahead_s))
    result = of(findings, "clock")
    assert result.status == status
    if status != "ok":
        assert f"late is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} this host" == result.detail
        assert "chrony" in result.fix


@pytest.mark.slow
async def test_a_host_that_does_not_come_is_named_and_the_others_are_probed(environ):
    first = Meeting(here("first", environ), PROBES, 3, 3.0)
    findings, failed = await asyncio.gather(first.run(), follow(here("bright", environ), PROBES, HANG_S))
    assert failed == 1
    assert of(findings, "hosts").status == "failed" and of(findings, "hosts").detail == "2 of 3 have met: first, bright"


async def test_another_token_does_not_meet(environ):
    with pytest.raises(UserError, match="does not have this run's token"):
        other = environ | {"MFLEET_TOKEN": "another"}
        await met(environ, follow(here("bright", other), PROBES, HANG_S), timeout_s=0.5)


async def test_a_port_that_is_taken_and_a_host_that_asks_nobody(environ):
    port = int(environ["MFLEET_CONTROLLER"].rsplit(":", 1)[1])
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    with pytest.raises(UserError, match=r"cannot be listened on .* choose another port"):
        await Meeting(here("first", environ), PROBES, 2, 0.1).run()
    server.close()
    with pytest.raises(UserError, match=r"nobody answered within 0 s .* start `mfleet doctor` there too"):
        await follow(here("bright", environ), PROBES, 0.0)


def test_the_number_of_hosts():
    assert hosts_of(None, {}) == (1, True)
    assert hosts_of(load(["experiment=quickstart", "cluster.nodes=3"]).cluster, {}) == (3, True)
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    srun |= {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n2"}
    assert hosts_of(None, srun) == (2, False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert hosts_of(None, dict(zip(names, ("1", "2", "0", "1"), strict=True))) == (2, True)


@pytest.mark.parametrize(
    ("answers", "status", "part"),
    [
        ({"a": {"gloo": 1e9, "nccl": 3e11}}, "ok", "8 processes: gloo 1.00 GB/s, nccl 300.00 GB/s"),
        ({"a": {"gloo": 1e9}, "b": "Connection refused"}, "failed", "b: Connection refused"),
        ({"a": {"gloo": 1e9}, "b": {"gloo": 1e7}}, "warning", "gloo 0.01 GB/s"),
        ({"a": {"gloo": 1e9, "nccl": 1e9}}, "warning", "nccl 1.00 GB/s"),
    ],
)
def test_the_verdict_on_an_all_reduce(answers, status, part):
    result = network.judge_exchange(answers, 8)
    assert result.status == status and part in result.detail and bool(result.fix) == (status != "ok")


@pytest.mark.slow
def test_an_all_reduce_on_this_host():
    result = network.alone(ProbeContext(None, os.environ, Host("here")))
    assert result.status == "ok" and result.detail.startswith("2 processes: gloo "), result


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=2)
def test_an_all_reduce_whose_first_process_is_not_there(monkeypatch):
    monkeypatch.setattr(network, "EXCHANGE_S", 20.0)
    with held_ports(1) as (port,):
        what = network.Exchange(f"127.0.0.1:{port}", "key", 1, 2)
        answer = network.exchange(Host("here"), 1, what, os.environ)
    assert isinstance(answer, str) and answer


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.in_turn(number=0, of=2)
def test_two_hosts(tmp_path):
    """The command itself, started on each of two hosts as srun would."""
    with Hosts(["n1", "n2"], [tmp_path]) as hosts:
        environ = os.environ | {"MFLEET_CONTROLLER": f"{hosts.addresses['n1']}:29600", "MFLEET_TOKEN": TOKEN}
        options = ["--quick", "--json", "experiment=quickstart", "cluster.nodes=2", f"run.out={tmp_path / 'run'}"]
        program = [sys.executable, "-m", "megatron_fleet.cli", "doctor", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        second, first = (hosts.run(name, program, environ, **pipes) for name in ("n2", "n1"))
        try:
            out, errors = first.communicate(timeout=HANG_S)
            _, said = second.communicate(timeout=HANG_S)
        finally:
            stop(first)
            stop(second)
    assert (first.returncode, second.returncode) == (0, 0), (out, errors, said)
    findings = json.loads(out)["findings"]
    results = {(row["name"], row["host"]): row for row in findings}
    assert results["hosts", "n1"]["detail"] == "2 of 2 have met: n1, n2"
    assert results["clock", "n1"]["status"] == results["all-reduce", "n1"]["status"] == "ok"
    assert results["all-reduce", "n1"]["detail"].startswith("2 processes: gloo ")
    assert results["shared memory", "n2"]["status"] == results["ports", "n1"]["status"] == "ok"
    assert "mfleet doctor: n2 has answered; 0 failures on all hosts" in said
