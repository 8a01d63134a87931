"""Probes between processes and hosts: ports, clocks, and all-reduce over gloo and NCCL."""

from __future__ import annotations

import errno
import json
import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fleet.cluster.inventory import LOOPBACK, Host
from megatron_fleet.cluster.launcher import die_with_parent, in_hosted_environment
from megatron_fleet.cluster.rank_identity import without_rank_variables
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.doctor.probe import NOT_NEEDED, Probe, ProbeContext, Result, Status

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST_PORTS = 4096
"""Free ports that ranks, engines, environments and Ray take from, and their connections."""
ADAPTERS, VERBS = Path("/sys/class/infiniband"), Path("/dev/infiniband")
"""RDMA adapters (InfiniBand and RoCE) with their ports, and the device files through which programs use them."""
FAR, WRONG = 0.5, 5.0
"""Seconds between clocks: beyond the first, events of hosts are out of order in traces and logs; beyond the second,
signed requests and certificates are refused sooner or later."""
EXCHANGE_S = 300.0
"""Deadline of an all-reduce, with the import of torch on a cold disk."""
SLOW_GLOO, SLOW_NCCL = 50e6, 5e9
"""Bytes per second: less than a network of 1 Gbit/s, and than one of 100 Gbit/s with NCCL."""


def ports(here: ProbeContext) -> Result:
    """Look whether the fixed ports of a run are free, and how many others there are."""
    low, high = map(int, PORT_RANGE.read_text().split())
    seen = f"{high - low} free ports"
    if high - low < LEAST_PORTS:
        return Result("failed", seen, "widen net.ipv4.ip_local_port_range")
    named = {"MFLEET_CONTROLLER": here.environ.get("MFLEET_CONTROLLER", "")}
    if "MASTER_ADDR" in here.environ and "TORCHELASTIC_RUN_ID" not in here.environ:  # torchrun itself listens there
        named["MASTER_PORT"] = f"{here.environ['MASTER_ADDR']}:{here.environ.get('MASTER_PORT', '')}"
    for name, address in named.items():
        host, _, port = address.rpartition(":")
        held = name == "MFLEET_CONTROLLER" and here.met
        if port.isdigit() and int(port) and is_here(host) and not held and (problem := _taken(host, int(port))):
            fix = f"end the other program, or choose another port in {name}"
            return Result("failed", f"port {port} of {name}: {problem}", fix)
        seen += f", {port} of {name}" if port.isdigit() else ""
    return Result("ok", seen)


def is_here(host: str) -> bool:
    """Whether a name or address is one of this host's."""
    import psutil

    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    try:
        return bool({str(info[4][0]) for info in socket.getaddrinfo(host, None)} & own)
    except OSError:
        return False


def _taken(host: str, port: int) -> str | None:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
            trial.listen(1)
        except OSError as error:
            return "another program listens there" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return None


def _on_several_gpu_hosts(here: ProbeContext) -> bool:
    return bool(here.host.devices) and here.config is not None and here.config.cluster.nodes > 1


def rdma(here: ProbeContext) -> Result:
    """Look for InfiniBand or RoCE adapters with an active port that programs may use."""
    assert here.config is not None
    fabric = here.config.launch.fabric
    if fabric in ("ethernet", "efa", "provider"):
        return Result("skipped", f"{NOT_NEEDED}InfiniBand and RoCE; launch.fabric is {fabric}")
    absent: Status = "failed" if fabric == "infiniband" else "warning"
    states = {port.parent: port for port in sorted(ADAPTERS.glob("*/ports/*/state"))}
    if not states:
        seen = "no RDMA adapter: NCCL uses TCP between hosts"
        return Result(absent, seen, "load the adapter's driver, or set launch.fabric=ethernet")
    active = [port for port, state in states.items() if state.read_text().strip().endswith("ACTIVE")]
    kinds = sorted({f"{_line(port / 'link_layer')} {_line(port / 'rate')}" for port in active or states})
    seen = f"{len(active)} of {len(states)} ports active: {', '.join(kinds)}"
    if not active:
        return Result(absent, seen, "check the cables and the subnet manager; ibstat shows the ports")
    if not list(VERBS.glob("uverbs*")):
        fix = "pass /dev/infiniband into the container, with --device or --privileged"
        return Result(absent, f"{seen}, but no /dev/infiniband/uverbs* here", fix)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        fix = "set `ulimit -l unlimited` for the run (containers: --ulimit memlock=-1)"
        return Result("warning", f"{seen}, but a process may lock only {locked >> 10} KiB of memory", fix)
    if len(active) < len(states):
        return Result("warning", seen, "check the other ports with ibstat, or list the ones to use in NCCL_IB_HCA")
    return Result("ok", seen)


def _line(file: Path) -> str:
    return file.read_text().strip() if file.exists() else "unknown"


def clock(offsets: Mapping[str, float]) -> Result:
    """Judge the seconds by which the clocks of other hosts are ahead of this one's."""
    if not offsets:
        return Result("skipped", f"{NOT_NEEDED}several hosts")
    name, worst = max(offsets.items(), key=lambda item: abs(item[1]))
    ahead = "ahead of" if worst > 0 else "behind"
    if abs(worst) < FAR:
        return Result("ok", f"at most {abs(worst) * 1e3:.0f} ms apart")
    seen, fix = f"{name} is {abs(worst):.1f} s {ahead} this host", "start a time service there, such as chrony"
    return Result("failed" if abs(worst) >= WRONG else "warning", seen, fix)


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-reduce of processes on several hosts.

    Attributes:
        rendezvous: address of the first process, ``host:port``.
        key: only processes with the same one meet.
        first: rank of the first process on this host.
        size: number of all processes.
    """

    rendezvous: str
    key: str
    first: int
    size: int


def processes_of(host: Host, hosts: int) -> int:
    """Return how many processes of a host take part: one for each GPU; two on the CPU of a host that is alone."""
    return len(host.devices) or (2 if hosts == 1 else 1)


def open_exchange(host: Host, size: int) -> tuple[socket.socket, Exchange]:
    """Bind the socket of the first process on this host, for the exchange of ``size`` processes."""
    listener = socket.socket()
    listener.bind((host.address, 0))
    listener.listen()
    return listener, Exchange(f"{host.address}:{listener.getsockname()[1]}", secrets.token_hex(16), 0, size)


def exchange(
    host: Host, count: int, what: Exchange, environ: Mapping[str, str], listener: socket.socket | None = None
) -> dict[str, float] | str:
    """Run this host's processes of an all-reduce to their end.

    Args:
        count: number of processes here.
        listener: where the first one of all listens.

    Returns:
        Bytes per second by ``gloo`` and ``nccl``, or what went wrong.
    """
    clean = without_secrets(without_rank_variables(environ))
    if host.devices:
        clean["CUDA_VISIBLE_DEVICES"] = ",".join(device.uuid for device in host.devices)
    started = []
    for local in range(count):
        first = listener if local == 0 else None
        request = {
            "rendezvous": what.rendezvous,
            "key": what.key,
            "rank": what.first + local,
            "size": what.size,
            "local_rank": local,
            "address": host.address,
            "listener": None if first is None else first.fileno(),
        }
        started.append(_start(json.dumps(request), clean, () if first is None else (first.fileno(),)))
    try:
        return _answers(started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _start(request: str, environ: Mapping[str, str], descriptors: Sequence[int]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_fleet.doctor.all_reduce"],
        env=dict(environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
        preexec_fn=die_with_parent(),
    )
    assert process.stdin is not None
    process.stdin.write(request)
    process.stdin.close()
    process.stdin = None  # for `communicate`
    return process


def _answers(started: Sequence[subprocess.Popen[str]]) -> dict[str, float] | str:
    found: list[dict[str, float]] = []
    for process in started:
        try:
            out, errors = process.communicate(timeout=EXCHANGE_S)
        except subprocess.TimeoutExpired:
            return f"no end within {EXCHANGE_S:g} s"
        if process.returncode:
            lines = errors.strip().splitlines() or [f"status {process.returncode}"]
            return lines[-1]
        found.append(json.loads(out.strip().splitlines()[-1]))
    return {name: min(speeds[name] for speeds in found) for name in found[0]}


def judge_exchange(answers: Mapping[str, dict[str, float] | str], size: int) -> Result:
    """Judge what ``exchange`` returned on each host, by name."""
    wrong = [f"{host}: {answer}" for host, answer in answers.items() if isinstance(answer, str)]
    if wrong:
        fix = "open the ports between the hosts, and set MFLEET_HOST_ADDRESS where they have several networks"
        return Result("failed", "; ".join(wrong), f"{fix}; NCCL_DEBUG=INFO tells more")
    speeds = [answer for answer in answers.values() if not isinstance(answer, str)]
    slowest = {name: min(each[name] for each in speeds) for name in speeds[0]}
    seen = f"{size} processes: {', '.join(f'{name} {speed / 1e9:.2f} GB/s' for name, speed in slowest.items())}"
    if len(answers) > 1 and slowest["gloo"] < SLOW_GLOO:
        return Result("warning", seen, "set MFLEET_HOST_ADDRESS to the address on the fast network")
    if slowest.get("nccl", SLOW_NCCL) < SLOW_NCCL:
        fix = "check with NCCL_DEBUG=INFO whether it uses NVLink and InfiniBand or RoCE; set NCCL_IB_HCA"
        return Result("warning", seen, fix)
    return Result("ok", seen)


def alone(here: ProbeContext) -> Result:
    """All-reduce between processes of this host."""
    host = Host(here.host.name, LOOPBACK, here.host.devices)
    count = processes_of(host, 1)
    if count == 1:
        return Result("skipped", f"{NOT_NEEDED}several GPUs")
    listener, what = open_exchange(host, count)
    with listener:
        return judge_exchange({host.name: exchange(host, count, what, here.environ, listener)}, count)


def _with_ranks(here: ProbeContext) -> bool:
    """Runs with ranks of their own need it, and machines on which such runs are set up."""
    return not in_hosted_environment() if here.config is None else here.config.ranks > 0


PROBES = (Probe("ports", ports), Probe("RDMA", rdma, _on_several_gpu_hosts, "several hosts with GPUs"))
ALONE = Probe("all-reduce", alone, _with_ranks, "runs with ranks", deadline_s=EXCHANGE_S + 10, slow=True)
"""All-reduce probe of a single host; several hosts do one together, see `many_hosts`."""
