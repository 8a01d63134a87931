"""Refusal of runs that cannot fit into their devices, and the table of a run's memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.model import Model
from megatron_fleet.planning.memory.engine_memory import GIB, EngineMemory, engine_memory
from megatron_fleet.planning.memory.phases import (
    IMBALANCE,
    RESERVE,
    DeviceMemory,
    PhaseMemory,
    RunMemory,
    run_memory,
)

CERTAIN = ("parameters", "gradients", "optimizer", "step", "engine weights")
"""Parts that are counted, not estimated (`planning.memory.phases`); activations are so in most runs, see `_counted`."""
CERTAIN_ON_HOST = ("offloaded state", "optimizer on CPU", "reference weights", "checkpoint copy")
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
    refuse_memory(config, hf_config, device_bytes, available)
    likely = run_memory(config, hf_config, device_bytes, IMBALANCE)
    if problem := _no_room(
        config, engine_memory(config, read_model(hf_config), hf_config), device_bytes, certain=False
    ):
        log.warning("%s", problem)
    for devices in likely.devices:
        for phase in devices.phases:
            _warn(config, devices, phase, device_bytes)
    if available is not None and sum(likely.host.values()) > available:
        log.warning(
            "memory: about %.0f GiB of host memory are needed, and the host has %.0f GiB.",
            sum(likely.host.values()) / GIB,
            available / GIB,
        )


def refuse_memory(config: Config, hf_config: Mapping[str, Any], device_bytes: int, available: int | None) -> None:
    """Refuse a run whose counted memory alone is more than there is, see `check_memory`.

    Raises:
        UserError: it cannot fit.
    """
    model = read_model(hf_config)
    least = run_memory(config, hf_config, device_bytes, imbalance=1.0)
    parts = (*CERTAIN, "activations") if _counted(config, model) else CERTAIN
    for devices in least.devices:
        for phase in devices.phases:
            _refuse(config, devices, phase, {part: phase.parts.get(part, 0) for part in parts}, device_bytes)
    if problem := _no_room(config, engine_memory(config, model, hf_config), device_bytes, certain=True):
        raise UserError(problem)
    if available is not None:
        _check_host(config, least.host, available)


def _counted(config: Config, model: Model) -> bool:
    """Whether activations are computed from tensors that tests have measured, and not from formulas that were read."""
    return not (config.precision.fp8 or config.parallel.virtual > 1 or model.latent or model.mixer is not None)


def _check_host(config: Config, host: Mapping[str, int], available: int) -> None:
    needed = sum(host[part] for part in CERTAIN_ON_HOST)
    if needed > available:
        raise UserError(
            f"memory: the trainer's state takes {needed / GIB:.0f} GiB of host memory, and the host has "
            f"{available / GIB:.0f} GiB; {_advice_for_host(config)}."
        )


def _advice_for_host(config: Config) -> str:
    ways = ["set checkpoint.asynchronous=false"] if config.checkpoint.asynchronous else []
    if fraction := config.policy.optimizer.offload_fraction:
        ways.append(f"lower policy.optimizer.offload_fraction={fraction:g}")
    return ", or ".join([*ways, "use more hosts"])


def _refuse(
    config: Config, devices: DeviceMemory, phase: PhaseMemory, certain: Mapping[str, int], device_bytes: int
) -> None:
    needed = sum(certain.values())
    if needed <= device_bytes:
        return
    largest = max(certain, key=lambda part: certain[part])
    raise UserError(
        f"memory: phase {phase.name} takes at least {needed / GIB:.1f} GiB on the GPUs of {_where(devices)}, which "
        f"have {device_bytes / GIB:.1f} GiB; {certain[largest] / GIB:.1f} GiB are {largest}: "
        f"{_advice(config, largest)}."
    )


def _warn(config: Config, devices: DeviceMemory, phase: PhaseMemory, device_bytes: int) -> None:
    if phase.total > device_bytes - RESERVE:
        log.warning(
            "memory: phase %s takes about %.1f GiB of the %.1f GiB on the GPUs of %s; %.1f GiB are %s: %s.",
            *(phase.name, phase.total / GIB, device_bytes / GIB, _where(devices)),
            *(phase.parts[phase.largest] / GIB, phase.largest, _advice(config, phase.largest)),
        )


def _no_room(config: Config, memory: EngineMemory, device_bytes: int, certain: bool) -> str | None:
    """Return why an engine's KV cache has no room for one sequence: ``certain``, or beside what is estimated only."""
    engine, context = config.rollout.engine, config.rollout.max_context
    allowed = int(device_bytes * engine.gpu_memory_utilization)
    most, likely = ((allowed - nbytes) // memory.token for nbytes in (memory.weights, memory.fixed))
    if engine.kv_cache_bytes is not None or likely > context or certain != (most <= context):
        return None
    return (
        f"rollout.engine.gpu_memory_utilization={engine.gpu_memory_utilization:g} of {device_bytes / GIB:.1f} GiB "
        f"leaves room for {max(0, most if most <= context else likely)} tokens of KV cache, less than one sequence of "
        f"rollout.max_context={context}; raise it or rollout.engine.tensor_parallel={engine.tensor_parallel}, or lower "
        f"rollout.max_context."
    )


def _advice(config: Config, part: str) -> str:
    policy, parallel, engine = config.policy, config.parallel, config.rollout.engine
    tensor = f"raise parallel.tensor={parallel.tensor}"
    if part in ("activations", "working", "fragments"):
        again, fewer = policy.recompute, f"lower policy.micro_batch_tokens={policy.micro_batch_tokens}"
        if again != "full":
            more = f"raise policy.recompute={again}" if isinstance(again, int) else "set policy.recompute=full"
            return f"{more}, {fewer}, or {tensor}"
        return f"{fewer}, {tensor}, or raise parallel.context"
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


def _where(devices: DeviceMemory) -> str:
    return _numbered(devices.holds.split()[0], devices.devices)


def _numbered(nouns: str, numbers: range) -> str:
    """Format as ``ranks 0–7``, or ``rank 0``."""
    one = len(numbers) == 1
    return f"{nouns.removesuffix('s')} {numbers[0]}" if one else f"{nouns} {numbers[0]}–{numbers[-1]}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}" if nbytes else "·"
