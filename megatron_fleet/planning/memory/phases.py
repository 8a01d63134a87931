"""Memory of each phase of a run, on each device and on each host.

The phases are those of `loop.colocation`, and the checkpoint. What cannot be computed (contexts, communicators,
fragments, processes) is a constant here, marked as an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fleet.config.schema import Config, OptimizerConfig, ParallelConfig
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.layout import logprob_chunk
from megatron_fleet.models.model import Model
from megatron_fleet.planning.memory.activations import (
    TrainingPass,
    chunk_bytes,
    chunks_in_flight,
)
from megatron_fleet.planning.memory.engine_memory import GIB, EngineMemory, engine_memory, stored_bytes
from megatron_fleet.planning.memory.parameters import (
    Elements,
    chunks_of_stage,
    elements_of_stage,
    layer_tensors,
)

H100_BYTES = 81_559 << 20
"""Memory of an H100 of 80 GB as ``nvidia-smi`` gives it: 79.6 GiB."""
RESERVE = int(1.5 * GIB)
"""Part of a device that a shipped configuration leaves free."""
CONTEXT = int(0.8 * GIB)
"""CUDA context, kernels and library workspaces of a process on a device (estimate)."""
COMMUNICATOR = GIB
"""Device memory of one NCCL communicator on a rank (estimate: slime frees 12 to 13 GB when it destroys Megatron's
groups, about a dozen, between the phases of a step; its release notes of v0.1.0)."""
FRAGMENTS = 0.05
"""Share of states and activations that the allocator holds beyond them (estimate: the mean of published whole devices,
`benchmarks/memory_points.py`)."""
IMBALANCE = 1.25
"""Tokens of the busiest expert-parallel rank, as a multiple of the mean (estimate: routers are not made to balance)."""
TRANSFER_BUFFER = GIB
"""Smallest buffer of the ``cuda_ipc`` transport (`weight_sync.cuda_ipc.sender.BUFFER_BYTES`)."""
CHECKPOINT_DEVICE, CHECKPOINT_HOST = GIB // 2, 2 * GIB
"""Bounds of what a rank needs beside its state while it saves."""
PINNED_BLOCK = 256 << 20
"""Unit in which offloaded state is kept in host memory (`trainer.megatron.offload.BLOCK_BYTES`)."""
CPU_ADAM = 16
"""Host bytes per element of an offloaded optimizer: master weight, two moments and the gradient, in float32."""
RANK_PROCESS, ENGINE_PROCESS, ENGINE_WORKER = 4 * GIB, 4 * GIB, 3 * GIB
WORKER, SERVICES = int(0.6 * GIB), 3 * GIB
"""Resident memory of an episode worker; of controller, Ray and its object store together (estimates)."""
DEVICES_PER_HOST = 8


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes on one device in a phase, by what they are for."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda part: self.parts[part])


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Phases of devices with equal tasks.

    Attributes:
        devices: ranks with these devices, such as those of a pipeline stage; or the engines' devices from 0.
        holds: ``ranks``, ``engines`` or ``ranks and engines``.
    """

    holds: str
    devices: range
    phases: tuple[PhaseMemory, ...]

    @property
    def worst(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Memory of a run.

    Attributes:
        host: bytes of one host's memory, by what they are for.
        kv_tokens: tokens that the KV cache of one engine holds.
        sequences: sequences of ``rollout.max_context`` tokens that fit into it.
    """

    devices: tuple[DeviceMemory, ...]
    host: Mapping[str, int]
    kv_tokens: int
    sequences: float


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of a rank of one pipeline stage.

    Attributes:
        fp8_weights: quantised copies of weights, while a pass runs.
        kept: activations that wait for their backward pass, of all micro-batches in flight.
        working: what the backward pass of one layer takes beside them.
        head: log-prob buffers, on the last stage.
        step: copies that the optimizer's step makes.
        host_optimizer: optimizer states in host memory.
        saved: the rank's share of a checkpoint: its optimizer states, and its part of parameters that others hold too.
    """

    elements: Elements
    parameters: int
    gradients: int
    optimizer: int
    fp8_weights: int
    kept: int
    working: int
    head: int
    step: int
    host_optimizer: int
    saved: int

    @property
    def states(self) -> dict[str, int]:
        return {"parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer}

    @property
    def passing(self) -> dict[str, int]:
        """Memory of a pass beside the states, at its peak: at the head, or in the backward pass of a layer."""
        temporary = max(self.head, self.working)
        if self.kept + temporary + self.fp8_weights < self.step:
            return {"step": self.step}
        return {"activations": self.kept, "working": temporary, "FP8 weights": self.fp8_weights}


def trainer_memory(config: Config, model: Model, stage: int, imbalance: float = IMBALANCE) -> TrainerMemory:
    """Compute the memory of the ranks of a pipeline stage."""
    policy, precision, parallel = config.policy, config.precision, config.parallel
    value_bytes = 4 if config.model.dtype == "float32" else 2
    count = elements_of_stage(model, parallel, stage, policy.lora, value_bytes)
    gradient_bytes = 4 if precision.gradients == "float32" else 2
    of = TrainingPass(
        model=model,
        parallel=parallel,
        tokens=policy.micro_batch_tokens,
        recompute=policy.recompute,
        value_bytes=value_bytes,
        fp8=precision.fp8,
        torch_layers=policy.kernels == "torch",
        imbalance=imbalance if parallel.expert > 1 else 1.0,
    )
    kept, working = zip(*(chunk_bytes(of, layers) for layers in chunks_of_stage(model, parallel, stage)), strict=True)
    waiting = sum(kept) * chunks_in_flight(parallel, stage, micro_batches(config)) // parallel.virtual
    last = stage == parallel.pipeline - 1
    return TrainerMemory(
        elements=count,
        parameters=count.stored + count.padding * value_bytes,
        gradients=count.buffers * gradient_bytes,
        optimizer=int(count.shards * optimizer_bytes(policy.optimizer, value_bytes)),
        fp8_weights=2 * count.linear if precision.fp8 and not precision.fp8_param_gather else 0,
        kept=waiting + (value_bytes * model.hidden * of.sliced if stage == 0 else 0),
        working=max(working),
        head=head_bytes(of, logprob_chunk(policy, cuda=True), gradient_bytes) if last else 0,
        step=4 * count.shards if gradient_bytes == 2 else 0,
        host_optimizer=int(CPU_ADAM * policy.optimizer.offload_fraction * count.shards),
        saved=count.shards * (value_bytes + whole_optimizer_bytes(policy.optimizer, value_bytes)),
    )


def optimizer_bytes(optimizer: OptimizerConfig, value_bytes: int) -> float:
    """Device bytes per element of a rank's share of optimizer states."""
    return whole_optimizer_bytes(optimizer, value_bytes) * (1 - optimizer.offload_fraction)


def whole_optimizer_bytes(optimizer: OptimizerConfig, value_bytes: int) -> int:
    """Bytes per element wherever it is: a float32 master weight (of a bfloat16 model) and two moments."""
    return 2 * (2 if optimizer.moments == "bfloat16" else 4) + (4 if value_bytes == 2 else 0)


def micro_batches(config: Config) -> int:
    """Largest number of micro-batches of one update on a data-parallel rank: every episode alone in one."""
    rollout = config.rollout
    episodes = rollout.prompts_per_step * rollout.samples_per_prompt
    return math.ceil(episodes / config.policy.updates_per_batch / config.parallel.data)


def head_bytes(of: TrainingPass, chunk: int, gradient_bytes: int) -> int:
    """Log-prob buffers (`trainer.megatron.logprob`), if every token is trained.

    The hidden states of trained tokens are kept, and in the backward pass there are their gradient, the same for all
    tokens, and the logits of one chunk. Gradients in another type than float32 cannot be added to in place: the
    weight's own then exists in float32 and in the model's type.
    """
    model, e, tensor = of.model, of.value_bytes, of.parallel.tensor
    hidden = 3 * e * model.hidden * of.local + 24 * of.local
    logits = e * min(chunk, of.local) * model.vocab // tensor
    weight = (4 + e) * model.vocab // tensor * model.hidden if gradient_bytes == 2 else 0
    return hidden + logits + weight


def communicators(model: Model, parallel: ParallelConfig) -> int:
    """Number of NCCL communicators of a rank: one for each kind of group with several ranks."""
    p, replicas = parallel, parallel.data * parallel.context
    kinds = [p.world_size, p.tensor, p.pipeline, p.context, replicas, p.tensor * p.pipeline]
    if model.experts:
        spread = p.expert * p.expert_tensor_size
        kinds += [p.expert, p.expert_tensor_size, p.tensor * replicas // spread]
    return sum(size > 1 for size in kinds)


def run_memory(
    config: Config, hf_config: Mapping[str, Any], device_bytes: int = H100_BYTES, imbalance: float = IMBALANCE
) -> RunMemory:
    """Compute the memory of a run on GPUs.

    Args:
        config: its ``rollout.engine.colocated`` may be undecided: engines then share the ranks' devices.
        hf_config: content of the model's ``config.json``.
        device_bytes: memory of each device.
        imbalance: see `activations.TrainingPass`.
    """
    model = read_model(hf_config)
    parallel, engine_config = config.parallel, config.rollout.engine
    colocated = engine_config.colocated is not False
    stages = [trainer_memory(config, model, stage, imbalance) for stage in range(parallel.pipeline)]
    engine = engine_memory(config, model, hf_config)
    cache = cache_bytes(config, engine, device_bytes)
    buffers = sync_buffers(config, model, hf_config)
    roll = {"engine context": _engine_context(config), **_engine_parts(engine, cache)}
    size = parallel.world_size // parallel.pipeline
    ranks = range(parallel.world_size)
    holds = "ranks and engines" if colocated else "ranks"
    devices = [
        DeviceMemory(
            holds,
            ranks[stage * size : (stage + 1) * size],
            _phases(config, model, memory, engine, buffers, roll if colocated else None),
        )
        for stage, memory in enumerate(stages)
    ]
    if not colocated:
        count = (engine_config.count + config.eval.engines) * engine_config.tensor_parallel
        devices.append(DeviceMemory("engines", range(count), (PhaseMemory("roll", roll),)))
    tokens = cache_tokens(config, engine, device_bytes)
    return RunMemory(
        tuple(devices), _host(config, stages, colocated), tokens, tokens / (config.rollout.max_context + 1)
    )


def cache_bytes(config: Config, engine: EngineMemory, device_bytes: int) -> int:
    """Return the size of an engine's KV cache on each of its devices."""
    given = config.rollout.engine
    return given.kv_cache_bytes or max(0, int(device_bytes * given.gpu_memory_utilization) - engine.fixed)


def cache_tokens(config: Config, engine: EngineMemory, device_bytes: int) -> int:
    """Return the number of tokens that an engine's KV cache holds."""
    states = engine.state * config.rollout.engine.sequences(config.rollout.episodes_in_flight)
    return max(0, cache_bytes(config, engine, device_bytes) - states) // engine.token


def _engine_context(config: Config) -> int:
    return CONTEXT + (COMMUNICATOR if config.rollout.engine.tensor_parallel > 1 else 0)


def _engine_parts(engine: EngineMemory, cache: int) -> dict[str, int]:
    return {"engine weights": engine.weights, "engine step": engine.step, "graphs": engine.graphs, "KV cache": cache}


def _phases(
    config: Config,
    model: Model,
    memory: TrainerMemory,
    engine: EngineMemory,
    buffers: Mapping[str, int],
    roll: Mapping[str, int] | None,
) -> tuple[PhaseMemory, ...]:
    """Phases of a rank's device.

    Args:
        buffers: result of `sync_buffers`.
        roll: memory of the engine that shares the device while it plays; ``None``: there is none.
    """
    own = {"context": CONTEXT, "communicators": COMMUNICATOR * communicators(model, config.parallel)}
    asleep = {} if roll is None else {"engine context": _engine_context(config)}
    allocated = memory.states | memory.passing
    train = {**own, **allocated, "fragments": int(FRAGMENTS * sum(allocated.values())), **asleep}
    sync = {**own, "parameters": memory.parameters, **buffers}
    if roll is None:
        sync |= {"gradients": memory.gradients, "optimizer": memory.optimizer}
    else:
        sync |= {**asleep, "engine weights": engine.weights, "engine layer": engine.layer}
    save = {**own, **memory.states, "boxes": CHECKPOINT_DEVICE, **asleep}
    found = [PhaseMemory("train", train), PhaseMemory("checkpoint", save), PhaseMemory("sync", sync)]
    if roll is not None:
        found.append(PhaseMemory("roll", {**own, **roll}))
    return tuple(found)


def sync_buffers(config: Config, model: Model, hf_config: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of the tensors on their way to the engines.

    A rank gathers a layer, or the embedding, whole, beside its own part of it and that of the rank that sends
    (`weights.exchange`); what engines hold quantised is gathered so. The transport's buffer holds at least the largest
    tensor.
    """
    embedding = (4 if config.model.dtype == "float32" else 2) * model.vocab * model.hidden
    kinds = {(model.has_mixer(i), model.has_experts(i)): i for i in range(model.layers)}
    together = [
        sum(
            count * stored_bytes(layer_tensors(model, parallel, i), config, hf_config)
            for count, parallel in ((1, ParallelConfig()), (2, config.parallel))
        )
        for i in kinds.values()
    ]
    gathered = max(*together, embedding + 2 * embedding // config.parallel.tensor)
    # No matrix of a layer is larger than the embedding of any model at hand.
    return {"gathered": gathered, "transfer": max(TRANSFER_BUFFER, embedding)}


def _host(config: Config, stages: Sequence[TrainerMemory], colocated: bool) -> dict[str, int]:
    """Memory of the host with most: ranks of one stage, its share of the engines, and all workers."""
    engine, parallel = config.rollout.engine, config.parallel
    ranks = min(parallel.world_size, DEVICES_PER_HOST)
    engines = (engine.count + config.eval.engines) * engine.tensor_parallel
    engines = min(engines, DEVICES_PER_HOST) // engine.tensor_parallel
    first = stages[0]
    kept = _pinned(first.parameters) + _pinned(first.optimizer) if colocated else 0
    reference = _pinned(first.parameters) if config.algorithm.kl.coef and not config.policy.lora.rank else 0
    copied = _pinned(first.saved) if config.checkpoint.asynchronous else 0
    return {
        "rank processes": ranks * RANK_PROCESS,
        "offloaded state": ranks * kept,
        "optimizer on CPU": ranks * first.host_optimizer,
        "reference weights": ranks * reference,
        "checkpoint copy": ranks * copied,
        "checkpoint": ranks * CHECKPOINT_HOST,
        "engine processes": engines * (ENGINE_PROCESS + engine.tensor_parallel * ENGINE_WORKER),
        "episode workers": config.rollout.workers * WORKER,
        "controller and Ray": SERVICES,
    }


def _pinned(nbytes: int) -> int:
    return -(-nbytes // PINNED_BLOCK) * PINNED_BLOCK
