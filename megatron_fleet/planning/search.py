"""Layouts and engines for a number of GPUs, ranked by the time of a step; only those that fit.

Trainer and engines are chosen apart, since neither's time depends on the other's layout; the fastest of both are then
combined, and their memory is checked together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from megatron_fleet.config import validate as rules
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config, ParallelConfig
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.layout import longest_chunk, micro_batch_alignment, validate
from megatron_fleet.models.model import Model
from megatron_fleet.planning.hardware import Gpu
from megatron_fleet.planning.memory.phases import RESERVE, RunMemory, run_memory
from megatron_fleet.planning.plan import devices_of, why_not
from megatron_fleet.planning.rollout import Engine, rollout_time
from megatron_fleet.planning.shapes import shape_of
from megatron_fleet.planning.step import StepTime, step_time, trainer_phases
from megatron_fleet.planning.workload import Workload

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Sizes of a parallel dimension that are tried."""
MICRO_BATCHES = (1, 2)
"""Micro-batches that are tried, as multiples of ``rollout.max_context``."""
TRAINER_SHARES = (0.25, 0.5, 0.75)
"""Shares of the GPUs that train, where engines have their own."""
RECOMPUTED = (0.25, 0.5, 0.75)
"""Shares of the layers that are recomputed, beside none and all."""
COMBINED = 100
"""Trainer layouts, and engines, of which every pair is considered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A layout that fits.

    Attributes:
        overrides: what makes it of the configuration that was given.
    """

    config: Config
    overrides: tuple[str, ...]
    step: StepTime
    memory: RunMemory

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of a step."""
        return self.step.devices * self.step.total / 3600


def search(config: Config, gpu: Gpu, load: Workload, devices: int, top: int = 10) -> list[Found]:
    """Return the layouts with the fastest steps on ``devices`` GPUs, the fastest first.

    Raises:
        UserError: none fits.
    """
    if devices < 1:
        raise UserError(f"--search {devices} searches layouts for a number of GPUs; give 1 or more.")
    hf_config, _ = shape_of(config.model.path)
    model = read_model(hf_config)
    shared = config.rollout.engine.colocated is not False
    splits = [devices] if shared else sorted({max(1, int(devices * share)) for share in TRAINER_SHARES})
    found: list[Found] = []
    reasons: list[str] = []
    for ranks in splits:
        engines = devices if shared else devices - ranks
        trainers = list(islice(_trainers(config, hf_config, model, gpu, load, ranks), COMBINED))
        players = _players(config, hf_config, model, gpu, load, engines)
        found += _fitting(trainers, players, hf_config, model, gpu, load, config, top, reasons)
    if not found:
        why = f" The fastest one: {reasons[0]}" if reasons else ""
        raise UserError(f"No layout of {devices} {gpu.name} fits; use more GPUs, or larger ones (--gpu).{why}")
    return sorted(found, key=lambda one: one.step.total)[:top]


def _fitting(
    trainers: list[Config],
    players: list[Config],
    hf_config: Mapping[str, Any],
    model: Model,
    gpu: Gpu,
    load: Workload,
    given: Config,
    top: int,
    reasons: list[str],
) -> list[Found]:
    """Pairs that fit, from the fastest on; ``reasons`` receives why others do not."""
    found: dict[Any, Found] = {}
    # Sums of ranks go up: pairs of fast trainers and fast engines come first.
    pairs = sorted(product(range(len(trainers)), range(len(players))), key=sum)
    for trainer, player in pairs:
        config = trainers[trainer].model_copy(update={"rollout": players[player].rollout})
        policy = config.policy
        layout = config.parallel, policy.micro_batch_tokens, policy.optimizer.offload_fraction, player
        if layout in found:  # with less recomputation
            continue
        try:
            rules.check(config)
        except UserError as error:
            reasons.append(str(error))
            continue
        memory = run_memory(config, hf_config, gpu.memory)
        # Ranked layouts leave some memory free, as the shipped experiments do.
        problem = why_not(config, hf_config, replace(gpu, memory=gpu.memory - RESERVE), memory)
        if problem is not None:
            reasons.append(problem)
            continue
        step = step_time(config, hf_config, model, gpu, load)
        found[layout] = Found(config=config, overrides=overrides(given, config), step=step, memory=memory)
        if len(found) == 2 * top:
            break
    return list(found.values())


def _trainers(
    config: Config, hf_config: Mapping[str, Any], model: Model, gpu: Gpu, load: Workload, ranks: int
) -> Iterator[Config]:
    """Trainer layouts whose memory fits by itself, the fastest first."""
    timed: list[tuple[float, int, Config]] = []
    for parallel in layouts(model, ranks, gpu.per_host):
        if not _valid(config.model_copy(update={"parallel": parallel}), hf_config):
            continue
        longest = longest_chunk(model.layers, parallel)
        some = sorted({int(share * longest) for share in RECOMPUTED} - {0})
        for recompute, multiple, offload in product(("none", *some, "full"), MICRO_BATCHES, (0.0, 1.0)):
            optimizer = config.policy.optimizer.model_copy(update={"offload_fraction": offload})
            tokens = multiple * config.rollout.max_context
            changes = {"recompute": recompute, "micro_batch_tokens": tokens, "optimizer": optimizer}
            tried = config.model_copy(update={"parallel": parallel, "policy": config.policy.model_copy(update=changes)})
            if tokens % micro_batch_alignment(parallel, config.precision) == 0:
                phases = trainer_phases(tried, hf_config, model, gpu, load)
                timed.append((sum(sum(parts.values()) for parts in phases.values()), len(timed), tried))
    engineless = config.rollout.engine.model_copy(update={"colocated": False, "replicas": 1, "tensor_parallel": 1})
    alone = config.rollout.model_copy(update={"engine": engineless})
    for _, _, tried in sorted(timed, key=lambda one: one[:2]):
        phases_alone = run_memory(tried.model_copy(update={"rollout": alone}), hf_config, gpu.memory).devices
        trainer = [device for device in phases_alone if device.holds == "ranks"]
        if all(device.phases[0].total <= gpu.memory for device in trainer):
            yield tried


def _valid(config: Config, hf_config: Mapping[str, Any]) -> bool:
    try:
        validate(hf_config, config.parallel, "full", config.policy.lora.rank)
    except UserError:
        return False
    return True


def layouts(model: Model, ranks: int, per_host: int) -> Iterator[ParallelConfig]:
    """Yield the layouts of a number of ranks: tensor and context parallelism within a host, experts whole."""
    for tensor, pipeline, context in product(SIZES, SIZES, SIZES):
        size = tensor * pipeline * context
        if ranks % size or tensor > per_host or pipeline > model.layers:
            continue
        stage = -(-model.layers // pipeline)
        last = model.layers - stage * (pipeline - 1)
        if last < 1:
            continue
        uneven = {} if model.layers % pipeline == 0 else {"last_stage_layers": last}
        for expert in SIZES if model.experts else (1,):
            if model.experts % expert or ranks % (expert * pipeline) or (expert > ranks // pipeline):
                continue
            yield ParallelConfig(
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                data=ranks // size,
                expert=expert,
                expert_tensor=1 if model.experts else None,
                **uneven,
            )


def _players(
    config: Config, hf_config: Mapping[str, Any], model: Model, gpu: Gpu, load: Workload, devices: int
) -> list[Config]:
    """Engines on a number of GPUs, the fastest first."""
    timed = []
    for size in SIZES:
        replicas = devices // size - config.eval.engines
        if size > gpu.per_host or devices % size or model.heads % size or replicas < 1:
            continue
        engine = config.rollout.engine.model_copy(
            update={
                "replicas": replicas,
                "tensor_parallel": size,
                "expert_parallel": config.rollout.engine.expert_parallel and size > 1,
            }
        )
        tried = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": engine})})
        speed = Engine.of(tried, hf_config, model, gpu, load)
        if speed.slots:
            timed.append((sum(rollout_time(speed).values()), size, tried))
    return [tried for _, _, tried in sorted(timed, key=lambda one: one[:2])]


def overrides(given: Config, found: Config) -> tuple[str, ...]:
    """Return the overrides by which ``found`` differs from ``given``."""
    return tuple(_differences("", given.model_dump(mode="json"), found.model_dump(mode="json")))


def _differences(name: str, given: Any, found: Any) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(found, dict):
        for key, value in found.items():
            yield from _differences(f"{name}.{key}" if name else key, given.get(key), value)
    elif given != found:
        yield f"{name}={'null' if found is None else str(found).lower() if isinstance(found, bool) else found}"


def as_rows(found: list[Found]) -> list[list[str]]:
    """Return a table of layouts, a header first."""
    gib = 1 << 30
    header = ["TP", "PP", "CP", "EP", "DP", "tokens", "recompute", "optimizer on host", "engines", "train GiB"]
    rows = [[*header, "roll GiB", "training s", "rollout s", "step s", "GPU-hours"]]
    for one in found:
        p, policy, engine = one.config.parallel, one.config.policy, one.config.rollout.engine
        peak = {
            name: max(
                (phase.total for device in one.memory.devices for phase in device.phases if phase.name == name),
                default=0,
            )
            for name in ("train", "roll")
        }
        rows.append(
            [
                *map(str, (p.tensor, p.pipeline, p.context, p.expert, p.data, policy.micro_batch_tokens)),
                str(policy.recompute),
                "yes" if policy.optimizer.offload_fraction else "no",
                f"{engine.count} × {engine.tensor_parallel}",
                *(f"{peak[name] / gib:.1f}" for name in ("train", "roll")),
                f"{one.step.seconds('training'):.1f}",
                f"{one.step.seconds('rollout'):.1f}",
                f"{one.step.total:.1f}",
                f"{one.gpu_hours:.2f}",
            ]
        )
    return rows


def as_json(found: list[Found]) -> list[dict[str, Any]]:
    """Return layouts as JSON, the fastest first."""
    return [
        {
            "overrides": list(one.overrides),
            "parallel": one.config.parallel.model_dump(mode="json"),
            "gpus": devices_of(one.config),
            "step_seconds": one.step.total,
            "gpu_hours": one.gpu_hours,
            "seconds": {phase: one.step.seconds(phase) for phase in one.step.phases},
        }
        for one in found
    ]
