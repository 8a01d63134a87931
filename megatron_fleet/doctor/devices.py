"""Probes of GPUs: their state, other processes on them, driver, NVSwitch fabric, access to each other.

They read what ``nvidia-smi -q -x`` writes (elements as in NVIDIA's nvsmi_device DTD) and ``nvidia-smi topo -p2p``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import psutil

from megatron_fleet.cluster.inventory import NVIDIA_SMI_DEADLINE_S, Inventory, cuda_is_installed
from megatron_fleet.cluster.placement import PlacementRequest, place
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import ROOT
from megatron_fleet.config.secrets import without_secrets
from megatron_fleet.doctor.probe import Probe, ProbeContext, Result, output, with_devices
from megatron_fleet.planning.hardware import other_kind

NEEDED_DRIVER = 580
"""Oldest driver of CUDA 13, as in setup.sh."""
LIBRARIES_S = 300.0
"""Importing vLLM, Megatron-Core and Transformer Engine, from a cold disk too."""
FREE_ENOUGH = 0.97
"""Part of a GPU's memory that is free when nobody uses it: the driver keeps some."""
_PEERS = re.compile(r"^\s*GPU(\d+)\s+(.*)$", re.MULTILINE)
_AMOUNT = re.compile(r"(\d+) MiB")


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU; ``mib``: its memory there, ``None`` where the driver does not say."""

    pid: int
    name: str
    mib: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi describes it.

    Attributes:
        total, free: memory in MiB; ``free`` leaves out what the driver has reserved.
        processes: on it, as far as this container sees them.
        fabric: state and status of its registration with the NVSwitch fabric; empty without one.
        faults: what the driver says is broken.
    """

    uuid: str
    name: str
    total: int
    free: int
    processes: tuple[Process, ...]
    fabric: tuple[str, str] | None
    faults: tuple[str, ...]


def parse(xml: str) -> tuple[str, list[Gpu]]:
    """Return the driver's version and the GPUs from the output of ``nvidia-smi -q -x``.

    Raises:
        UserError: it is something else.
    """
    try:
        log = ElementTree.fromstring(xml)
        return _text(log, "driver_version"), [_gpu(element) for element in log.iter("gpu")]
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"the output of nvidia-smi -q -x could not be parsed ({error}); update the driver.") from None


def _gpu(element: ElementTree.Element) -> Gpu:
    memory = {name: _mib(_text(element, f"fb_memory_usage/{name}")) for name in ("total", "free")}
    processes = tuple(
        Process(int(_text(p, "pid")), _text(p, "process_name"), _mib_or_none(_text(p, "used_memory")))
        for p in element.iterfind("processes/process_info")
    )
    fabric = _text(element, "fabric/state"), _text(element, "fabric/status")
    return Gpu(
        _text(element, "uuid"),
        _text(element, "product_name"),
        memory["total"],
        memory["free"],
        processes,
        None if fabric[0] in ("", "N/A", "Not Supported") else fabric,
        tuple(_faults(element)),
    )


def _faults(element: ElementTree.Element) -> Sequence[str]:
    found = []
    if _text(element, "gpu_reset_status/reset_required") == "Yes":
        found.append("a reset is required")
    for name in ("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"):
        count = _text(element, f"ecc_errors/volatile/{name}")
        if count.isdigit() and int(count):
            found.append(f"{count} uncorrectable memory errors ({name.split('_')[0].upper()}) since the driver started")
    if _text(element, "remapped_rows/remapped_row_pending") == "Yes":
        found.append("memory rows wait for a reset to be remapped")
    if _text(element, "remapped_rows/remapped_row_failure") == "Yes":
        found.append("memory rows could not be remapped")
    if _text(element, "compute_mode") not in ("", "Default", "N/A"):
        found.append(f"compute mode {_text(element, 'compute_mode')}, and an engine shares the GPU with a rank")
    for prefix in ("clocks_event_reason", "clocks_throttle_reason"):
        for name in ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"):
            if _text(element, f"{prefix}s/{prefix}_{name}") == "Active":
                found.append(f"slowed down ({name})")
    return found


def _text(element: ElementTree.Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _mib(text: str) -> int:
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not an amount of memory")
    return int(found[1])


def _mib_or_none(text: str) -> int | None:
    return _mib(text) if _AMOUNT.fullmatch(text) else None


def _seen(here: ProbeContext) -> tuple[str, list[Gpu]]:
    """Driver, and the GPUs that processes of this environment see."""
    driver, gpus = parse(_nvidia_smi(here, "-q", "-x"))
    mine = {device.uuid for device in here.host.devices}
    return driver, [gpu for gpu in gpus if gpu.uuid in mine]


def _nvidia_smi(here: ProbeContext, *arguments: str) -> str:
    program = shutil.which("nvidia-smi", path=here.environ.get("PATH"))
    if program is None:
        raise UserError("there is no nvidia-smi in PATH; install the NVIDIA driver, or start the container with GPUs.")
    return output([program, *arguments], without_secrets(here.environ), NVIDIA_SMI_DEADLINE_S)


def with_cuda(here: ProbeContext) -> bool:
    """Runs with a torch that is built for GPUs."""
    return cuda_is_installed() and bool(here.environ.get("CUDA_VISIBLE_DEVICES", "all").strip())


def devices(here: ProbeContext) -> Result:
    """Compare the GPUs with those that the run needs on one host, and look for broken ones."""
    _, gpus = _seen(here)
    if not gpus:
        return Result(
            "failed",
            "torch is built for GPUs, but no GPU is visible",
            "fix the driver, or pass the GPUs into the container",
        )
    kinds = sorted({f"{gpu.name} of {gpu.total / 1024:.0f} GiB" for gpu in gpus})
    seen = f"{len(gpus)} × {', '.join(kinds)}"
    if broken := [f"GPU {i}: {fault}" for i, gpu in enumerate(gpus) for fault in gpu.faults]:
        fix = "reset it (nvidia-smi --gpu-reset) or leave the host out; dmesg has the Xid errors"
        return Result("failed", f"{seen}: {'; '.join(broken)}", fix)
    if len(kinds) > 1:
        return Result("warning", seen, "the slowest sets the pace; choose equal ones with CUDA_VISIBLE_DEVICES")
    config = here.config
    if config is not None and config.cluster.ranks == "local" and not config.cluster.nodes:
        place(Inventory((here.host,)), PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines))
    if config is not None and (problem := other_kind(config.cluster, [gpu.name for gpu in gpus])) is not None:
        return Result("warning", seen, problem)
    return Result("ok", seen)


def others(here: ProbeContext) -> Result:
    """Look for other processes on the GPUs than this one and those that it was started by, and for memory that nobody
    visible holds.
    """
    taken, ours = [], {os.getpid(), *(parent.pid for parent in psutil.Process().parents() if parent.pid != 1)}
    for index, gpu in enumerate(_seen(here)[1]):
        for process in (each for each in gpu.processes if each.pid not in ours):
            size = "" if process.mib is None else f", {process.mib} MiB"
            taken.append(f"GPU {index}: process {process.pid} ({process.name}{size})")
        if not gpu.processes and gpu.free < FREE_ENOUGH * gpu.total:
            taken.append(f"GPU {index}: {gpu.total - gpu.free} MiB taken by processes outside of this container")
    if taken:
        return Result("failed", "; ".join(taken), "end them, or choose other GPUs with CUDA_VISIBLE_DEVICES")
    return Result("ok", "none")


def driver(here: ProbeContext) -> Result:
    """Compare the driver's version with the one that the pinned CUDA needs."""
    version, _ = _seen(here)
    major = version.split(".")[0]
    if not major.isdigit() or int(major) < NEEDED_DRIVER:
        return Result("failed", version, f"CUDA 13 needs driver {NEEDED_DRIVER} or newer; update it")
    return Result("ok", version)


def fabric(here: ProbeContext) -> Result:
    """Look whether GPUs behind NVSwitches are registered with the fabric, which the fabric manager does."""
    states = {gpu.fabric for gpu in _seen(here)[1]}
    if states == {None}:
        return Result("ok", "no NVSwitch")
    wrong = sorted(" ".join(state) for state in states if state not in (None, ("Completed", "Success")))
    if wrong:
        fix = "systemctl restart nvidia-fabricmanager on the host; its version must be the driver's"
        return Result("failed", f"fabric: {', '.join(wrong)}; CUDA does not start without it", fix)
    return Result("ok", "registered with the NVSwitch fabric")


def parse_peers(text: str) -> dict[tuple[int, int], str]:
    """Return state by pair of GPUs, ``OK`` or a code as NS, from the output of ``nvidia-smi topo -p2p``."""
    rows = {int(found[1]): found[2].split() for found in _PEERS.finditer(text) if not found[2].startswith("GPU")}
    return {(a, b): state for a, row in rows.items() for b, state in enumerate(row) if a != b}


def peers(here: ProbeContext) -> Result:
    """Look whether every GPU reads the memory of every other one, and whether by NVLink."""
    mine = {device.index for device in here.host.devices}
    state = {}
    for capability in ("r", "n"):
        table = parse_peers(_nvidia_smi(here, "topo", "-p2p", capability))
        state[capability] = {pair: word for pair, word in table.items() if mine.issuperset(pair)}
    if len(state["r"]) != len(mine) * (len(mine) - 1):
        return Result("failed", "nvidia-smi topo -p2p does not list all GPUs", "read its output, and update the driver")
    closed = [f"{a}→{b} {word}" for (a, b), word in state["r"].items() if word != "OK"]
    if closed:
        fix = "switch off IOMMU and ACS on the host, or fix NVLink; without peer access NCCL goes through host memory"
        return Result("failed", f"no peer access: {', '.join(closed)}", fix)
    linked = sum(word == "OK" for word in state["n"].values())
    seen = f"{len(state['r'])} pairs, {linked} by NVLink"
    if linked < len(state["n"]):
        return Result("warning", seen, "exchanges over PCIe are slow; keep parallel.tensor=1, or use NVLinked GPUs")
    return Result("ok", seen)


def libraries(here: ProbeContext) -> Result:
    """Import what a run needs, compile a kernel, and compute on every GPU."""
    script, config = ROOT / "requirements" / "smoke_gpu.py", here.config
    fp8 = config is None or config.rollout.engine.fp8(config.precision.recipe)
    said = output([sys.executable, script], without_secrets(here.environ), LIBRARIES_S).splitlines()
    wrong = [line for line in said if line.startswith("not verified") and (fp8 or "for FP8 engines" not in line)]
    last = said[-1].removeprefix("verified: ") if said else "nothing said"
    return Result("warning", "; ".join(wrong), "run ./setup.sh --gpu again") if wrong else Result("ok", last)


def _several_devices(here: ProbeContext) -> bool:
    return len(here.host.devices) > 1


PROBES = (
    Probe("GPUs", devices, with_cuda, "runs on GPUs", deadline_s=NVIDIA_SMI_DEADLINE_S),
    Probe("other processes on GPUs", others, with_devices, "runs on GPUs", deadline_s=NVIDIA_SMI_DEADLINE_S),
    Probe("driver", driver, with_cuda, "runs on GPUs", deadline_s=NVIDIA_SMI_DEADLINE_S),
    Probe("fabric manager", fabric, with_devices, "runs on GPUs", deadline_s=NVIDIA_SMI_DEADLINE_S),
    Probe("peer access", peers, _several_devices, "runs on several GPUs", deadline_s=NVIDIA_SMI_DEADLINE_S),
    Probe("GPU libraries", libraries, with_devices, "runs on GPUs", deadline_s=LIBRARIES_S, slow=True),
)
