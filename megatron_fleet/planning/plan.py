"""Plan of a run: what it computes, what it needs, how long a step takes, and why it does not fit if it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.cluster.placement import PlacementRequest, place
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config, RolloutConfig
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.layout import check_micro_batch_tokens, validate
from megatron_fleet.models.model import Model
from megatron_fleet.planning.hardware import GPUS, Gpu
from megatron_fleet.planning.memory.check import refuse_memory
from megatron_fleet.planning.memory.engine_memory import GIB
from megatron_fleet.planning.memory.phases import RunMemory, run_memory
from megatron_fleet.planning.modes import Mode, modes
from megatron_fleet.planning.shapes import shape_of
from megatron_fleet.planning.step import (
    StepTime,
    active_parameters,
    checkpoint_bytes,
    model_bytes,
    parameters,
    step_time,
)
from megatron_fleet.planning.workload import Workload

TRAJECTORY_BYTES = 8
"""Bytes of a token in the records of trajectories, as compressed text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on GPUs of one kind.

    Attributes:
        source: where the model's shape is from.
        hosts: hosts with all their GPUs in use, rounded up.
        problem: why it does not fit, with what to change; ``None``: it fits.
        disk: bytes on disk by what they are for, checkpoints as many as are kept.
        step: ``None`` if not even one episode fits into an engine.
        modes: what other modes would take; empty without ``step``.
    """

    config: Config
    model: Model
    source: str
    gpu: Gpu
    load: Workload
    devices: int
    hosts: int
    memory: RunMemory
    problem: str | None
    disk: Mapping[str, int]
    step: StepTime | None
    modes: Sequence[Mode] = ()

    @property
    def parameters(self) -> tuple[int, int]:
        """Parameters, and those that compute a token."""
        return parameters(self.model), active_parameters(self.model)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward pass per token of the workload, attention included."""
        cost, load = SequenceCost.of(self.model), self.load
        return 3 * (cost.token + cost.pair * load.pairs() / load.mean + cost.prediction * load.sampled)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of a step; 0 without a step time."""
        return 0.0 if self.step is None else self.devices * self.step.total / 3600

    @property
    def tokens_per_s(self) -> float:
        """Tokens of episodes per second and GPU; 0 without a step time."""
        return 0.0 if self.step is None else self.load.tokens / self.step.total / self.devices


def make_plan(config: Config, gpu: Gpu, load: Workload) -> Plan:
    """Plan a run; the number of its engines is that of `with_engines`.

    Raises:
        UserError: the model's shape is not known, or it cannot be computed in this layout at all.
    """
    config = with_engines(config)
    hf_config, source = shape_of(config.model.path)
    model = read_model(hf_config)
    validate(hf_config, config.parallel, config.policy.recompute, config.policy.lora.rank)
    check_micro_batch_tokens(config.policy.micro_batch_tokens, config.parallel, config.precision)
    devices = devices_of(config)
    memory = run_memory(config, hf_config, gpu.memory)
    problem = why_not(config, hf_config, gpu, memory)
    step = step_time(config, hf_config, model, gpu, load) if memory.kv_tokens >= load.mean else None

    def step_s(rollout: RolloutConfig) -> float:
        changed = config.model_copy(update={"rollout": rollout})
        return step_time(changed, hf_config, model, gpu, load).total

    return Plan(
        config=config,
        model=model,
        source=source,
        gpu=gpu,
        load=load,
        devices=devices,
        hosts=-(-devices // gpu.per_host),
        memory=memory,
        problem=problem,
        disk=_disk(config, model, load),
        step=step,
        modes=() if step is None else modes(config.rollout, step_s),
    )


def with_engines(config: Config) -> Config:
    """Return ``config`` with a number of engines in place of ``rollout.engine.replicas=auto``: those that the ranks'
    devices hold, or as many devices again where engines do not share them."""
    engine = config.rollout.engine
    if engine.replicas != "auto":
        return config
    replicas = max(1, config.parallel.world_size // engine.tensor_parallel)
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"engine": engine.model_copy(update={"replicas": replicas})})
        }
    )


def devices_of(config: Config) -> int:
    """Return the number of GPUs of a run."""
    engine, ranks = config.rollout.engine, config.parallel.world_size
    own = (engine.count + config.eval.engines) * engine.tensor_parallel
    return ranks + own if engine.colocated is False else max(ranks, own)


def why_not(config: Config, hf_config: Mapping[str, Any], gpu: Gpu, memory: RunMemory) -> str | None:
    """Return why a run cannot have its GPUs, by the checks that precede a start and by what they only warn of."""
    try:
        place(
            _inventory(gpu, devices_of(config)),
            PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines),
        )
        refuse_memory(config, hf_config, gpu.memory, gpu.host_memory)
    except UserError as error:
        return str(error)
    for device in memory.devices:
        worst = device.worst
        if worst.total > gpu.memory:
            return (
                f"memory: phase {worst.name} takes about {worst.total / GIB:.1f} GiB of the {gpu.memory / GIB:.1f} GiB "
                f"of a GPU; {worst.parts[worst.largest] / GIB:.1f} GiB are {worst.largest}."
            )
    host = sum(memory.host.values())
    if host > gpu.host_memory:
        return f"memory: a host needs about {host / GIB:.0f} GiB, and has {gpu.host_memory / GIB:.0f} GiB."
    return None


def problem_on(config: Config, gpu: Gpu) -> str | None:
    """Return why a run cannot have its GPUs of a kind; ``None``: it can, or the model's shape is not known here."""
    try:
        hf_config, _ = shape_of(config.model.path)
    except UserError:
        return None
    return why_not(config, hf_config, gpu, run_memory(config, hf_config, gpu.memory))


def larger_gpu(plan: Plan) -> str | None:
    """Return the smallest kind of GPU with more memory into which the same run fits, if there is one."""
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.memory):
        larger = gpu.memory > plan.gpu.memory and gpu.flops >= plan.gpu.flops
        if larger and problem_on(plan.config, gpu) is None:
            return gpu.name
    return None


def _inventory(gpu: Gpu, devices: int) -> Inventory:
    """Hosts with that many GPUs; none of them is here."""
    hosts = []
    for first in range(0, devices, gpu.per_host):
        count = min(gpu.per_host, devices - first)
        here = tuple(Device(i, f"GPU-{first + i}", gpu.name, gpu.memory) for i in range(count))
        hosts.append(Host(f"host {first // gpu.per_host}", f"10.0.{first >> 16}.{first // gpu.per_host % 250}", here))
    return Inventory(tuple(hosts))


def _disk(config: Config, model: Model, load: Workload) -> dict[str, int]:
    """Bytes on the disk of a run."""
    whole, kept = model_bytes(model, config), config.checkpoint  # a quantised model takes less
    saved = checkpoint_bytes(config, model)
    exports = int(kept.export.last) + (kept.export.keep if kept.export.every else 0) + int(kept.export.best)
    found = {
        "model": whole,
        "checkpoints": saved * (kept.keep + 1 if kept.interval else 1),  # and the one that is being written
        "exports": whole * exports,
        "trajectories of 100 steps": int(100 * load.tokens * TRAJECTORY_BYTES),
    }
    return {name: size for name, size in found.items() if size}
