"""Seconds of a step by phase, and what follows from them: what binds, how busy the GPUs are.

Colocated, or with engines that wait for the trainer, a step is the sum of its phases. With ``rollout.max_staleness``
above 0 separate engines play while the trainer works, and a step is the longer of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_fleet.config.schema import Config, ParallelConfig
from megatron_fleet.models.model import Model
from megatron_fleet.planning.hardware import Gpu
from megatron_fleet.planning.memory.engine_memory import sent_bytes
from megatron_fleet.planning.memory.parameters import count_elements, held_by_stage
from megatron_fleet.planning.memory.phases import trainer_memory
from megatron_fleet.planning.rollout import Engine, rollout_time
from megatron_fleet.planning.training import forward_time, training_flops, training_time
from megatron_fleet.planning.workload import Workload

SYNC_S, SYNC_RATE = 0.3, 27e9
"""Seconds of a weight sync, and bytes per second besides: NCCL broadcasts of 30B to 1T parameters in buckets take 19 to
44 GB/s (miles, its page on peer-to-peer weight transfer). Every rank gathers every layer whole, as engines hold it, so
it does not get faster with more of them."""
WAKE_S = 1.0
"""Seconds of an engine's sleep and wake, besides the trainer's copies (vLLM frees and maps memory)."""
DISK = 2e9
"""Bytes per second that the ranks of a host write together."""
STEP_S = 2.0
"""Seconds of a step beside its phases: sampling of tasks, advantages, data for the ranks, records."""

ROLLOUT, TRAINING = "rollout", "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        phases: seconds by phase, each by what they are spent on.
        concurrent: engines play while the trainer works.
        devices, trainer_devices: GPUs of the run, and those of them that train.
        flops: FLOPs that the model needs in training, without what is recomputed.
        engine: speed of one engine.
    """

    phases: Mapping[str, Mapping[str, float]]
    concurrent: bool
    devices: int
    trainer_devices: int
    flops: float
    engine: Engine

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase; 0 if the step has none of that name."""
        return sum(self.phases.get(phase, {}).values())

    @property
    def trainer(self) -> float:
        """Seconds of all phases but the rollout."""
        return sum(self.seconds(phase) for phase in self.phases if phase != ROLLOUT)

    @property
    def total(self) -> float:
        if self.concurrent:
            return max(self.seconds(ROLLOUT), self.trainer)
        return self.seconds(ROLLOUT) + self.trainer

    @property
    def binds(self) -> tuple[str, str]:
        """The phase that takes longest, and the largest part of it."""
        trainer = [phase for phase in self.phases if phase != ROLLOUT]
        longest = max(trainer, key=self.seconds)
        rollout = self.seconds(ROLLOUT)
        if rollout >= (self.trainer if self.concurrent else self.seconds(longest)):
            longest = ROLLOUT
        parts = self.phases[longest]
        return longest, max(parts, key=lambda part: parts[part])

    @property
    def mfu(self) -> float:
        """FLOPs that the model needs in training, of what the trainer's GPUs could compute meanwhile."""
        return self.flops / (self.seconds(TRAINING) * self.trainer_devices * self.engine.gpu.flops)


def step_time(
    config: Config,
    hf_config: Mapping[str, Any],
    model: Model,
    gpu: Gpu,
    load: Workload,
    old_pass: bool | None = None,
    overlapped: bool = True,
) -> StepTime:
    """Return the seconds of a step.

    Args:
        old_pass: log-probs of the old policy are computed by a pass of their own; ``None``: as the trainer does.
        overlapped: see `rollout.Engine`.
    """
    engine = Engine.of(config, hf_config, model, gpu, load, overlapped)
    shared = config.rollout.engine.colocated is not False
    trainer = trainer_phases(config, hf_config, model, gpu, load, old_pass)
    own = (config.rollout.engine.count + config.eval.engines) * config.rollout.engine.tensor_parallel
    ranks = config.parallel.world_size
    return StepTime(
        phases={ROLLOUT: rollout_time(engine), **trainer},
        concurrent=not shared and config.rollout.max_staleness > 0 and config.rollout.unfinished == "continue",
        devices=max(ranks, own) if shared else ranks + own,
        trainer_devices=ranks,
        flops=training_flops(model, load),
        engine=engine,
    )


def trainer_phases(
    config: Config, hf_config: Mapping[str, Any], model: Model, gpu: Gpu, load: Workload, old_pass: bool | None = None
) -> dict[str, Mapping[str, float]]:
    """Return the seconds of the phases that take the trainer, see `step_time`."""
    phases: dict[str, Mapping[str, float]] = {}
    if config.policy.updates_per_batch > 1 if old_pass is None else old_pass:
        phases["old log-probs"] = forward_time(config, model, gpu, load)
    if config.algorithm.kl.coef:
        phases["reference log-probs"] = _reference(config, model, gpu, load)
    phases[TRAINING] = training_time(config, model, gpu, load)
    phases["weight sync"] = {"messages": SYNC_S, "bytes": sent_bytes(config, model, hf_config) / SYNC_RATE}
    if config.rollout.engine.colocated is not False:
        phases["offload and onload"] = _offload(config, model, gpu)
    if config.checkpoint.interval:
        phases["checkpoint"] = {"pause": checkpoint_pause(config, model, gpu) / config.checkpoint.interval}
    phases["other"] = {"controller": STEP_S}
    return phases


def _reference(config: Config, model: Model, gpu: Gpu, load: Workload) -> Mapping[str, float]:
    """A forward pass, with the reference's weights brought from host memory and the policy's brought back."""
    swapped = 2 * trainer_memory(config, model, 0).parameters / gpu.pcie
    return {**forward_time(config, model, gpu, load), "weights from the host": swapped}


def _offload(config: Config, model: Model, gpu: Gpu) -> Mapping[str, float]:
    memory = trainer_memory(config, model, 0)
    return {"copies": 2 * (memory.parameters + memory.optimizer) / gpu.pcie, "engines": WAKE_S}


@lru_cache(maxsize=16)
def parameters(model: Model) -> int:
    """Return the number of the language model's parameters."""
    return count_elements(held_by_stage(model, ParallelConfig()), ParallelConfig(), 2).trained


def active_parameters(model: Model) -> int:
    """Return the number of parameters that compute a token: of the experts, those chosen for it."""
    with_experts = sum(map(model.has_experts, range(model.layers)))
    idle = with_experts * (model.experts - model.experts_per_token) * 3 * model.hidden * model.expert_ffn
    return parameters(model) - idle


def model_bytes(model: Model, config: Config) -> int:
    """Return the size of the model in the trainer's data type."""
    return parameters(model) * (4 if config.model.dtype == "float32" else 2)


def checkpoint_bytes(config: Config, model: Model) -> int:
    """Return the size of a checkpoint."""
    stages = config.parallel.pipeline
    saved = sum(trainer_memory(config, model, stage).saved for stage in range(stages))
    return saved * config.parallel.world_size // stages


def checkpoint_pause(config: Config, model: Model, gpu: Gpu) -> float:
    """Return the seconds for which a checkpoint stops training: its copy to host memory, or all of it."""
    each = max(trainer_memory(config, model, stage).saved for stage in {0, config.parallel.pipeline - 1})
    if config.checkpoint.asynchronous:
        return each / gpu.pcie
    return each * min(gpu.per_host, config.parallel.world_size) / DISK
