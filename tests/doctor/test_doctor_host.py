"""Probes of a host fail on a machine that is broken on purpose, each with its fix."""

import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

pytest.importorskip("hydra")

from megatron_fleet.cluster.inventory import Device, Host
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.doctor import host, network, probe
from megatron_fleet.doctor.probe import Finding, Probe, ProbeContext, Result, ask

HERE = ProbeContext(None, os.environ, Host("here"))
GPUS = ProbeContext(None, os.environ, Host("here", devices=(Device(0, "GPU-a", "H100", 80 << 30),)))
CGROUPS = Path("/sys/fs/cgroup")
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
PIDFD_GETFD, EPERM = 438, 1


def forbid_pidfd_getfd() -> None:
    """Have the kernel refuse what debuggers do, as the default profile of containers does."""

    class Step(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.POINTER(Step))]

    load_number, refuse, allow = Step(0x20, 0, 0, 0), Step(0x06, 0, 0, 0x00050000 | EPERM), Step(0x06, 0, 0, 0x7FFF0000)
    steps = (Step * 4)(load_number, Step(0x15, 0, 1, PIDFD_GETFD), refuse, allow)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(Program(4, steps)), 0, 0) == 0


def break_process() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1 << 14))
    forbid_pidfd_getfd()


BROKEN = """
mount -t tmpfs -o size=1m tmpfs /dev/shm
mount -t tmpfs -o size=8m tmpfs "$1"
cd "$1"
for group in memory:memory.limit_in_bytes:600000000 pids:pids.max:300; do
  folder=/sys/fs/cgroup/${group%%:*}/$2 rest=${group#*:}
  mkdir "$folder" 2>/dev/null && echo "${rest#*:}" >"$folder/${rest%%:*}" && echo $$ >"$folder/cgroup.procs"
done
shift 2
exec "$@"
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Results by probe, of a machine on which everything is too small."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a machine is broken in a mount namespace, which needs root")
    folder, group = tmp_path_factory.mktemp("small"), f"mfleet-test-{os.getpid()}"
    command = ["unshare", "--mount", "sh", "-c", BROKEN, "sh", str(folder), group]
    command += [sys.executable, "-m", "megatron_fleet.cli", "doctor", "--quick", "--json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MFLEET_")}
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=HANG_S, preexec_fn=break_process, check=False
        )
    finally:
        for made in CGROUPS.glob(f"*/{group}"):
            made.rmdir()
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert said["failed"] == sum(row["status"] == "failed" for row in said["findings"])
    return {row["name"]: row for row in said["findings"]}


@pytest.mark.parametrize(
    ("name", "detail", "fix"),
    [
        ("shared memory", "1 MiB free in /dev/shm; the run needs 256 MiB", "--shm-size"),
        (
            "open files",
            "256 in a process (at most 16384); the run needs 4096",
            "run `ulimit -n 4096` before the command",
        ),
        ("disk space", "0.0 GiB free at ", "choose another run.out"),
        ("disk speed", "67108864 bytes are needed and the disk has ", "free some space"),
    ],
)
def test_too_small(broken, name, detail, fix):
    assert broken[name]["status"] == "failed"
    assert detail in broken[name]["detail"] and fix in broken[name]["fix"]


def test_processes_that_cannot_look_into_each_other_are_a_warning(broken):
    assert broken["tracing"]["status"] == "warning"
    assert "Operation not permitted" in broken["tracing"]["detail"] and "SYS_PTRACE" in broken["tracing"]["fix"]


@pytest.mark.skipif(
    not (CGROUPS / "memory" / "memory.limit_in_bytes").exists(), reason="no control groups of version 1"
)
def test_limits_of_the_control_group(broken):
    memory, tasks = broken["memory"], broken["control group"]
    assert memory["status"] == "failed" and "control group 0.6 GiB" in memory["detail"]
    assert memory["fix"] == "raise the memory limit of the container or job, or use more hosts"
    assert tasks["status"] == "failed" and " of 300 processes" in tasks["detail"] and "pids.max" in tasks["fix"]


@pytest.mark.parametrize("name", ["shared memory", "open files", "tracing", "disk space", "disk speed"])
def test_this_machine_is_good_enough(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (asked,) = ask([p for p in host.PROBES if p.name == name], HERE)
    assert asked.result.status == "ok", asked


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A function that writes files of control groups, at ``job/step`` and above; yields their root."""
    monkeypatch.setattr(host, "PROC", tmp_path)
    monkeypatch.setattr(host, "CGROUP", tmp_path / "cgroup")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:cpu,cpuacct:/job/step\n3:memory:/job/step\n0::/job/step\n")
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 33554432 kB\n")

    def write(**files):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "cgroup" / "job" / "step").mkdir(parents=True, exist_ok=True)

    return write


def test_control_groups_of_version_2_and_limits_above(groups):
    groups()
    assert host.memory(HERE).status == "ok" and host.control_group(HERE).status == "ok"
    groups(job__memory_dot_max="5000000000", job__memory_dot_current="4000000000")
    groups(job__memory_dot_stat="anon 1\ninactive_file 500000000\n", job__step__memory_dot_max="max")
    result = host.memory(HERE)
    assert result.status == "failed" and result.detail.startswith("1.4 GiB free of ")
    groups(job__memory_dot_stat="anon 1\ninactive_file 3900000000\n")
    assert host.memory(HERE).status == "ok"
    groups(job__cpu_dot_max="50000 100000")
    assert host.control_group(HERE) == Result(
        "failed",
        f"unlimited processes and threads, CPU time of 0.5 of {os.cpu_count()} cores",
        "give the container or job at least one core",
    )
    groups(job__cpu_dot_max="max 100000", job__pids_dot_max="2000", job__pids_dot_current="1500")
    assert host.control_group(HERE).detail.startswith("500 of 2000 processes")


def test_shared_memory_holds_the_weights_of_engines_on_cpus():
    config = load(["experiment=quickstart", "rollout.engine.transport=shm"])
    with_weights = host.shared_memory(ProbeContext(config, os.environ, Host("here")))
    needed = int(with_weights.detail.split()[-2])
    assert needed > int(host.shared_memory(HERE).detail.split()[-2])


def test_a_connection_of_every_episode_is_an_open_file():
    config = load(["experiment=quickstart", "rollout.episodes_in_flight=100000"])
    result = host.open_files(ProbeContext(config, os.environ, Host("here")))
    assert result.status == "failed" and "the run needs 404096" in result.detail and "nofile" in result.fix


def test_no_compiler(tmp_path):
    (tmp_path / "bin").mkdir()
    without = ProbeContext(None, {"PATH": str(tmp_path / "bin")}, Host("here"))
    result = host.compiler(without)
    assert result == Result("failed", "there is no program cc", "install g++, and have cc in PATH")
    (tmp_path / "bin" / "cc").write_text("#!/bin/sh\necho 'cc: fatal error: no as here' >&2; exit 1\n")
    (tmp_path / "bin" / "cc").chmod(0o755)
    assert host.compiler(without).detail == "cc failed: cc: fatal error: no as here"


@pytest.mark.skipif(shutil.which("cc") is None or not host.PYTHON_H.is_file(), reason="needs cc and Python.h")
def test_a_compiler(monkeypatch, tmp_path):
    assert host.compiler(HERE).status == "ok"
    monkeypatch.setattr(host, "PYTHON_H", tmp_path / "Python.h")
    assert host.compiler(HERE).fix.startswith("install python3.")


def test_expandable_segments_are_refused_on_gpus():
    segments = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    (asked,) = ask([p for p in host.PROBES if p.name == "tracing"], ProbeContext(None, segments, GPUS.host))
    assert asked.result.status == "failed" and "expandable_segments:True out" in asked.result.fix


SLOWED = """
mkdir "$1" && echo "$2 10000000" >"$1/blkio.throttle.write_bps_device" && echo $$ >"$1/cgroup.procs" || exit 9
shift 2
exec "$@"
"""


@pytest.mark.slow
def test_a_slow_disk(tmp_path):
    group, device = CGROUPS / "blkio" / f"mfleet-test-{os.getpid()}", os.stat(tmp_path).st_dev
    if os.geteuid() or not (CGROUPS / "blkio" / "blkio.throttle.write_bps_device").exists():
        pytest.skip("a disk is slowed down by a control group of version 1, as root")
    program = "import os; from megatron_fleet.doctor.host import *; from megatron_fleet.cluster.inventory import Host"
    program += "; print(disk_speed(ProbeContext(None, os.environ, Host('here'))))"
    try:
        done = subprocess.run(
            ["sh", "-c", SLOWED, "sh", group, f"{os.major(device)}:{os.minor(device)}", sys.executable, "-c", program],
            cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
    finally:
        group.rmdir()
    if done.returncode == 9:
        pytest.skip(f"this disk cannot be slowed down: {done.stderr}")
    assert "status='failed'" in done.stdout and "faster disk" in done.stdout, done


def test_a_taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        here = ProbeContext(None, {"MFLEET_CONTROLLER": address}, Host("here"))
        result = network.ports(here)
        assert result.status == "failed" and "another program listens there" in result.detail
        assert result.fix == "end the other program, or choose another port in MFLEET_CONTROLLER"
        assert network.ports(ProbeContext(None, here.environ, here.host, met=True)).status == "ok"
    assert network.ports(here).status == "ok"


def test_few_ports(tmp_path, monkeypatch):
    (tmp_path / "range").write_text("32768\t33000\n")
    monkeypatch.setattr(network, "PORT_RANGE", tmp_path / "range")
    assert network.ports(HERE) == Result("failed", "232 free ports", "widen net.ipv4.ip_local_port_range")


def found(probe: Probe, here: ProbeContext = HERE) -> Finding:
    (finding,) = ask([probe], here)
    return finding


def test_what_a_probe_raises_or_warns_of_is_its_result():
    def refuse(here):
        raise UserError("key: the store is full; free some space.")

    def warn(here):
        probe.logging.getLogger("megatron_fleet.x").warning("W&B does not answer; go on")
        return Result("ok", "fine")

    def fail(here):
        raise ZeroDivisionError("oh")

    assert found(Probe("p", refuse)).result == Result("failed", "key: the store is full", "free some space")
    assert found(Probe("p", warn)).result == Result("warning", "W&B does not answer", "go on")
    assert found(Probe("p", fail)).result.detail == "ZeroDivisionError: oh"
    assert found(Probe("p", fail, lambda here: False, "runs on the moon")).result.detail == "only for runs on the moon"
    quick = ProbeContext(None, {}, HERE.host, quick=True)
    assert found(Probe("p", fail, slow=True), quick).result == Result("skipped", "left out by --quick")


def test_a_probe_that_hangs_is_left_behind():
    import threading

    event = threading.Event()
    slow = Probe("hangs", lambda here: Result("ok", str(event.wait())), deadline_s=0.2)
    findings = ask([slow, Probe("quick", lambda here: Result("ok", "here"))], HERE)
    event.set()
    assert [f.result.status for f in findings] == ["failed", "ok"]
    assert findings[0].result.detail == "no answer within 0.2 s"
