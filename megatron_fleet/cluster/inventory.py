"""Inventory of hosts and their devices, detected with nvidia-smi; needs neither torch nor CUDA."""

from __future__ import annotations

import csv
import ipaddress
import itertools
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.secrets import without_secrets

LOOPBACK = "127.0.0.1"
MIB = 1 << 20
NVIDIA_SMI_DEADLINE_S = 60.0
"""Without the persistence daemon, the first query on a host with eight devices takes about ten seconds."""
_QUERY = "index,uuid,name,memory.total,mig.mode.current"
_CAPABILITY = "compute_cap"
_OUTSIDE = "192.0.2.1"
"""An unassigned address (RFC 5737), so that the route to it is the default route."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.

    Attributes:
        index: index on its host in nvidia-smi's order, which is CUDA's order only with CUDA_DEVICE_ORDER=PCI_BUS_ID;
            processes are assigned devices by ``uuid``.
        uuid: ``GPU-…``, as for CUDA_VISIBLE_DEVICES.
        kind: product name.
    """

    index: int
    uuid: str
    kind: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of a run.

    Attributes:
        address: address at which the other hosts reach it.
        devices: empty: it computes on its CPU. The host's i-th rank uses the i-th device.
        ranks: the ranks that run here, in the order of their local ranks; ``None``: `placement.place` decides.
        rollout: engines and episode workers can run here.
        rollout_only: it has engines only, and may join and leave at any time; it is never part of an inventory.
    """

    name: str
    address: str = LOOPBACK
    devices: tuple[Device, ...] = ()
    ranks: tuple[int, ...] | None = None
    rollout: bool = True
    rollout_only: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """All hosts of a run, the controller's first."""

    hosts: tuple[Host, ...]

    def host(self, name: str) -> Host:
        """Return the host with this name. Raises KeyError."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)

    def visible_devices(self, host: str, devices: Sequence[int]) -> str:
        """Return CUDA_VISIBLE_DEVICES for a process with these devices (by index) of ``host``. Raises KeyError."""
        by_index = {device.index: device.uuid for device in self.host(host).devices}
        return ",".join(by_index[index] for index in devices)


@dataclass(frozen=True, slots=True)
class StartedRank:
    """Location of an externally started rank; ``device``: the device that it uses, ``None`` on a CPU."""

    rank: int
    local_rank: int
    host: str
    address: str
    device: Device | None = None


def with_nodes(own: Host, nodes: Sequence[Host]) -> Inventory:
    """Return the inventory of hosts that run `mfleet node`, with ranks to be placed. ``own``: the controller's host."""
    others = [node for node in nodes if node.name != own.name]
    if len(others) < len(nodes):
        return Inventory((own, *others))
    # The controller's host runs no node, so neither ranks nor rollout can run on it.
    return Inventory((Host(own.name, own.address, ranks=(), rollout=False), *others))


def with_started_ranks(own: Host, nodes: Sequence[Host], ranks: Sequence[StartedRank]) -> Inventory:
    """Return the inventory of hosts with externally started ranks and hosts that run `mfleet node`.

    Args:
        own: the controller's host; it can have engines without a node.

    Raises:
        UserError: ranks contradict each other.
    """
    hosts = {host.name: host for host in (own, *nodes)}
    for rank in ranks:
        hosts.setdefault(rank.host, Host(rank.host, rank.address, rollout=False))
    return Inventory(tuple(_with_ranks(host, [r for r in ranks if r.host == host.name]) for host in hosts.values()))


def _with_ranks(host: Host, ranks: Sequence[StartedRank]) -> Host:
    """Return ``host`` with its ranks, and their devices before its other devices."""
    ordered = sorted(ranks, key=lambda rank: rank.local_rank)
    for one, other in itertools.pairwise(ordered):
        if one.local_rank == other.local_rank:
            raise UserError(
                f"Ranks {one.rank} and {other.rank} both claim to be local rank {one.local_rank} of host "
                f"{host.name}; give hosts names of their own, or fix the launch command."
            )
    used = tuple(rank.device for rank in ordered if rank.device is not None)
    named = {device.uuid for device in used}
    free = tuple(device for device in host.devices if device.uuid not in named)
    return replace(host, devices=used + free, ranks=tuple(rank.rank for rank in ordered))


def assumed_inventory(count: int, kind: str, memory_bytes: int) -> Inventory:
    """Return one host with ``count`` equal GPUs that are not here, to plan for."""
    devices = tuple(Device(i, f"GPU-{i}", kind, memory_bytes) for i in range(count))
    return Inventory((Host("assumed", LOOPBACK, devices),))


def local_inventory(environ: Mapping[str, str], alone: bool = True) -> Inventory:
    """Return this host, with the devices that the installed torch can use and CUDA_VISIBLE_DEVICES allows.

    Args:
        alone: no other host takes part, so the address is loopback.

    Raises:
        UserError: see `nvidia_devices` and `host_address`.
    """
    devices = nvidia_devices(environ) if cuda_is_installed() else ()
    return Inventory((Host(socket.gethostname(), host_address(environ, alone), devices),))


def cuda_is_installed() -> bool:
    """Return whether the torch of this Python environment can use CUDA, judging by its version alone."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False  # the environment of runs at a hosted service


def nvidia_devices(environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the GPUs visible to processes with this environment, in CUDA_VISIBLE_DEVICES order; none without
    nvidia-smi.

    Raises:
        UserError: nvidia-smi fails, CUDA_VISIBLE_DEVICES names an unknown device, or a device is split (MIG).
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None or (visible is not None and not visible.strip()):
        return ()
    devices = [_device(line) for line in csv.reader(_ask(program, environ).splitlines(), skipinitialspace=True) if line]
    chosen = devices if visible is None else _choose(devices, visible)
    for device, split in chosen:
        if split:
            raise UserError(
                f"GPU {device.index} ({device.kind}) is in MIG mode, which is not supported; switch it off with "
                f"`nvidia-smi -i {device.index} -mig 0`, or leave the GPU out with CUDA_VISIBLE_DEVICES."
            )
    return tuple(device for device, _ in chosen)


def compute_capability(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the compute capability of this host's first GPU, (9, 0) for an H100, without starting CUDA here;
    ``None`` without a GPU or nvidia-smi.

    Raises:
        UserError: nvidia-smi fails.
    """
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    lines = _ask(program, environ, _CAPABILITY).split() if program else []
    if not lines:
        return None
    major, _, minor = lines[0].partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise _failed(f"it answered {lines[0]!r} to --query-gpu={_CAPABILITY}")
    return int(major), int(minor)


def host_address(environ: Mapping[str, str], alone: bool = True) -> str:
    """Return the address at which other hosts reach this one: MFLEET_HOST_ADDRESS, else that of the default route.

    Args:
        alone: there are no other hosts; the address is loopback.

    Raises:
        UserError: MFLEET_HOST_ADDRESS is not an IP address, or there is no default route.
    """
    given = environ.get("MFLEET_HOST_ADDRESS")
    if given:
        try:
            return str(ipaddress.ip_address(given))
        except ValueError:
            raise UserError(
                f"MFLEET_HOST_ADDRESS={given} is not an IP address; set the one by which other hosts reach this one."
            ) from None
    if alone:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_OUTSIDE, 9))  # UDP: selects a route without sending anything
        except OSError as error:
            raise UserError(
                f"Host {socket.gethostname()} has no default route ({error}), so its address is not known; set "
                f"MFLEET_HOST_ADDRESS to the one by which other hosts reach it."
            ) from None
        return str(probe.getsockname()[0])


def _ask(program: str, environ: Mapping[str, str], query: str = _QUERY) -> str:
    """Query nvidia-smi; returns one line per GPU, none without a GPU."""
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command,
            env=without_secrets(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(str(error)) from None
    answer = f"{done.stdout}{done.stderr}".strip()
    if "No devices were found" in answer:
        return ""
    if done.returncode:
        raise _failed(answer.splitlines()[0] if answer else f"status {done.returncode}")
    return done.stdout


def _failed(reason: str) -> UserError:
    return UserError(
        f"nvidia-smi failed ({reason.rstrip('.')}); fix the driver, or set CUDA_VISIBLE_DEVICES to nothing to compute "
        f"on the CPU."
    )


def _device(fields: Sequence[str]) -> tuple[Device, bool]:
    """Parse a GPU, and whether it is split into instances (MIG), from one line of nvidia-smi's output."""
    try:
        index, uuid, kind, mebibytes, mig = fields
        return Device(int(index), uuid, kind, int(mebibytes) * MIB), mig == "Enabled"
    except ValueError:
        line = ", ".join(fields)
        raise _failed(f"it answered {line!r} to --query-gpu={_QUERY}") from None


def _choose(devices: Sequence[tuple[Device, bool]], visible: str) -> list[tuple[Device, bool]]:
    """Return the devices that CUDA_VISIBLE_DEVICES names, in its order: indices, UUIDs or unique UUID prefixes."""
    chosen: list[tuple[Device, bool]] = []
    for name in (part.strip() for part in visible.split(",")):
        if name in ("-1", "NoDevFiles"):  # CUDA ignores these and everything after; Slurm sets the second
            break
        if name.startswith("MIG-"):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES={visible} names a part of a GPU (MIG), which is not supported; name whole GPUs."
            )
        found = [d for d in devices if name == str(d[0].index) or (name[:4] == "GPU-" and d[0].uuid.startswith(name))]
        if len(found) != 1 or found[0] in chosen:
            known = ", ".join(f"{device.index} ({device.uuid})" for device, _ in devices) or "none"
            twice = found and found[0] in chosen
            wrong = "names one GPU twice" if twice else f"names {name!r}, which is not a GPU here"
            raise UserError(f"CUDA_VISIBLE_DEVICES={visible} {wrong}; there are: {known}.")
        chosen += found
    return chosen
