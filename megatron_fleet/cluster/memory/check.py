"""Refusal of runs that cannot fit into their devices, and the table of a run's memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.cluster.memory.engine import GIB
from megatron_fleet.cluster.memory.phases import RESERVE, DeviceMemory, PhaseMemory, RunMemory, run_memory
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config

CERTAIN = ("parameters", "gradients", "optimizer", "step", "activations", "engine weights")
"""Parts that are counted, not estimated (`cluster.memory.phases`)."""
CERTAIN_ON_HOST = ("offloaded state", "optimizer on CPU", "reference weights")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The limit of this process's control group: a number, or ``max``."""
log = logging.getLogger(__name__)


def host_bytes() -> int:
    """Return the memory that processes on this host may use: all, or the limit of the container."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_LIMIT.read_text(encoding="utf-8").strip() if CGROUP_LIMIT.is_file() else "max"
    return min(installed, int(limit)) if limit.isdigit() else installed


def check_memory(config: Config, hf_config: Mapping[str, Any], device_bytes: int, available: int | None) -> None:
    """Refuse a run whose counted memory alone is more than there is; warn when estimates bring it to the edge.

    Args:
        hf_config: content of the model's ``config.json``.
        device_bytes: memory of the smallest device.
        available: memory of the host with least; ``None``: not known.

    Raises:
        UserError: it cannot fit.
    """
    memory = run_memory(config, hf_config, device_bytes)
    for devices in memory.devices:
        for phase in devices.phases:
            _check_phase(config, devices, phase, device_bytes)
    _check_cache(config, memory, device_bytes)
    if available is not None:
        _check_host(config, memory.host, available)


def _check_host(config: Config, host: Mapping[str, int], available: int) -> None:
    needed = sum(host[part] for part in CERTAIN_ON_HOST)
    if needed > available:
        raise UserError(
            f"memory: the trainer's state takes {needed / GIB:.0f} GiB of host memory, and the host has "
            f"{available / GIB:.0f} GiB; lower policy.optimizer.offload_fraction="
            f"{config.policy.optimizer.offload_fraction:g}, or use more hosts."
        )
    if sum(host.values()) > available:
        log.warning(
            "memory: about %.0f GiB of host memory are needed, and the host has %.0f GiB.",
            sum(host.values()) / GIB,
            available / GIB,
        )


def _check_phase(config: Config, devices: DeviceMemory, phase: PhaseMemory, device_bytes: int) -> None:
    certain = {part: phase.parts[part] for part in CERTAIN if part in phase.parts}
    needed = sum(certain.values())
    where = _numbered(devices.holds.split()[0], devices.devices)
    if needed > device_bytes:
        largest = max(certain, key=lambda part: certain[part])
        raise UserError(
            f"memory: phase {phase.name} takes at least {needed / GIB:.1f} GiB on the GPUs of {where}, which have "
            f"{device_bytes / GIB:.1f} GiB; {certain[largest] / GIB:.1f} GiB are {largest}: {_advice(config, largest)}."
        )
    if phase.total > device_bytes - RESERVE:
        log.warning(
            "memory: phase %s takes about %.1f GiB of the %.1f GiB on the GPUs of %s; %.1f GiB are %s: %s.",
            *(phase.name, phase.total / GIB, device_bytes / GIB, where),
            *(phase.parts[phase.largest] / GIB, phase.largest, _advice(config, phase.largest)),
        )


def _check_cache(config: Config, memory: RunMemory, device_bytes: int) -> None:
    engine, context = config.rollout.engine, config.rollout.max_context
    if memory.kv_tokens > context or engine.kv_cache_bytes is not None:
        return
    raise UserError(
        f"rollout.engine.gpu_memory_utilization={engine.gpu_memory_utilization:g} of {device_bytes / GIB:.1f} GiB "
        f"leaves room for {memory.kv_tokens} tokens of KV cache, less than one sequence of rollout.max_context="
        f"{context}; raise it or rollout.engine.tensor_parallel={engine.tensor_parallel}, or lower rollout.max_context."
    )


def _advice(config: Config, part: str) -> str:
    policy, parallel, engine = config.policy, config.parallel, config.rollout.engine
    tensor = f"raise parallel.tensor={parallel.tensor}"
    if part in ("activations", "working", "fragments"):
        if policy.recompute != "full":
            return (
                f"set policy.recompute=full, lower policy.micro_batch_tokens={policy.micro_batch_tokens}, or {tensor}"
            )
        return f"lower policy.micro_batch_tokens={policy.micro_batch_tokens}, {tensor}, or raise parallel.context"
    if part in ("optimizer", "step"):
        return f"raise parallel.data={parallel.data}, or set policy.optimizer.offload_fraction=1"
    if part in ("parameters", "gradients", "FP8 weights"):
        return f"{tensor}, parallel.pipeline={parallel.pipeline} or parallel.expert={parallel.expert}"
    if part == "engine weights":
        return f"raise rollout.engine.tensor_parallel={engine.tensor_parallel}"
    return f"lower rollout.engine.gpu_memory_utilization={engine.gpu_memory_utilization:g}"


def describe_memory(memory: RunMemory, device_bytes: int, max_context: int) -> list[str]:
    """Return the memory of a run as lines of text: a table of GiB for devices with equal tasks, and totals."""
    lines: list[str] = []
    for devices in memory.devices:
        title = f"{devices.holds}, {_numbered('GPUs', devices.devices)} (GiB)"
        parts = list(dict.fromkeys(part for phase in devices.phases for part in phase.parts))
        rows = [[title, *(phase.name for phase in devices.phases)]]
        rows += [[part, *(_gib(phase.parts.get(part, 0)) for phase in devices.phases)] for part in parts]
        rows += [[f"together, of {device_bytes / GIB:.1f}", *(_gib(phase.total) for phase in devices.phases)]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
    lines.append(
        f"KV cache of an engine: {memory.kv_tokens:,} tokens, {memory.sequences:.1f} sequences of {max_context:,}"
    )
    host = ", ".join(f"{part} {nbytes / GIB:.0f}" for part, nbytes in memory.host.items() if nbytes)
    return [*lines, f"host memory: about {sum(memory.host.values()) / GIB:.0f} GiB ({host})"]


def _numbered(nouns: str, numbers: range) -> str:
    """Format as ``ranks 0–7``, or ``rank 0``."""
    one = len(numbers) == 1
    return f"{nouns.removesuffix('s')} {numbers[0]}" if one else f"{nouns} {numbers[0]}–{numbers[-1]}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}" if nbytes else "·"
