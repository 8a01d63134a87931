"""Memory of training runs that others have published, against `planning.memory`. Prints a Markdown table.

GB are what PyTorch allocates on the rank with most; GiB are of a whole device, with contexts, communicators and what
the allocator holds beside. What a publication does not say is in ``assumed``. One constant follows from these points:
`phases.FRAGMENTS`, the mean over the whole devices.

    python benchmarks/memory_points.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_fleet.config.schema import Config
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.models.model import Model
from megatron_fleet.planning.memory import phases
from megatron_fleet.planning.memory.engine_memory import GIB
from megatron_fleet.planning.memory.phases import TrainerMemory, trainer_memory
from megatron_fleet.planning.shapes import KNOWN as MODELS

GB = 10**9
BRIDGE, SWIFT = "Megatron-Bridge 067f987", "ms-swift 3602360"


TE_HEAD, NATIVE_HEAD = 2, 10
"""Bytes per logit: TE's fused cross-entropy writes the gradient into the bfloat16 logits; Megatron's keeps these, a
float32 copy that becomes the soft-max, and for a moment its gradient (2 + 4 + 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A published figure.

    Attributes:
        measured: bytes.
        whole: the figure is of a whole device.
        world: ranks.
        parallel, sections: configuration in our keys; ``data`` follows from ``world``.
        batch: sequences of an update.
        logit: bytes per logit at the head, where all logits exist at once.
        optimizer: bytes per element of a rank's share, where it is none of ours.
        stored: bytes per weight of a linear layer, where it is none of ours.
        balanced: routers are made to balance.
    """

    model: str
    where: str
    measured: float
    whole: bool
    world: int
    parallel: Mapping[str, Any]
    tokens: int
    batch: int
    logit: int
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optimizer: float | None = None
    stored: int | None = None
    balanced: bool = False
    assumed: str = ""


FULL = {"policy": {"recompute": "full"}}
CPU_ADAM = {"policy": {"recompute": "full", "optimizer": {"lr": 1e-6, "offload_fraction": 1.0}}}
BF16_GRADIENTS = {"precision": {"gradients": "bfloat16"}}
FP8_GRADIENTS = {"precision": {"gradients": "bfloat16", "recipe": "fp8_tensorwise", "fp8_param_gather": True}}
_SWIFT = "gradients in float32; GiB of a whole device"
_LLAMA = {"model": "Llama-3-70B", "world": 32, "whole": False, "tokens": 4096, "batch": 32, "logit": NATIVE_HEAD}
_LLAMA |= {"sections": FP8_GRADIENTS, "stored": 1, "assumed": "weights kept in FP8 once; optimizer in float32"}
POINTS: tuple[Point, ...] = (
    Point(
        model="Moonlight-16B-A3B", where=f"{BRIDGE}, perf-activation-recompute", measured=36.618 * GB, whole=False,
        world=8, parallel={"tensor": 2, "expert": 8}, tokens=4096, batch=4, logit=TE_HEAD, sections=BF16_GRADIENTS,
        optimizer=6, assumed="master weights as 16 remaining bits, moments in bfloat16 (recipe)",
    ),
    Point(
        model="Qwen3-30B-A3B", where=f"{BRIDGE}, moe-optimization.md", measured=61.351 * GB, whole=False, world=16,
        parallel={"expert": 16}, tokens=4096, batch=1024, logit=TE_HEAD, sections=BF16_GRADIENTS, optimizer=10,
        balanced=True, assumed="master weights as 16 remaining bits, moments in float32 (recipe)",
    ),
    Point(**_LLAMA, where=f"{BRIDGE}, perf-memory-tuning", measured=58.8 * GB,
          parallel={"tensor": 4, "pipeline": 4, "virtual": 5}),
    Point(**_LLAMA, where=f"{BRIDGE}, perf-memory-tuning", measured=53.2 * GB,
          parallel={"tensor": 4, "pipeline": 8, "virtual": 5}),
    Point(**_LLAMA, where=f"{BRIDGE}, perf-memory-tuning", measured=50.2 * GB,
          parallel={"tensor": 8, "pipeline": 4, "virtual": 5}),
    Point(
        model="Qwen2.5-14B", where=f"{SWIFT}, base_to_chat.sh", measured=65 * GIB, whole=True, world=8,
        parallel={"tensor": 4}, tokens=8192, batch=16, logit=NATIVE_HEAD, assumed=_SWIFT,
    ),
    Point(
        model="Qwen3-14B", where=f"{SWIFT}, fp8/benchmark.sh, BF16", measured=52 * GIB, whole=True, world=8,
        parallel={"tensor": 4}, tokens=8192, batch=16, logit=NATIVE_HEAD, optimizer=6,
        assumed=f"moments in bfloat16, master weights as 16 remaining bits; {_SWIFT}",
    ),
    Point(
        model="Qwen2.5-72B", where=f"{SWIFT}, dense/72b_offload.sh", measured=65 * GIB, whole=True, world=8,
        parallel={"tensor": 8}, tokens=8192, batch=16, logit=NATIVE_HEAD, sections=CPU_ADAM, assumed=_SWIFT,
    ),
    Point(
        model="Qwen3-30B-A3B", where=f"{SWIFT}, moe/qwen3_moe.sh", measured=60 * GIB, whole=True, world=16,
        parallel={"pipeline": 2, "expert": 8}, tokens=8192, batch=16, logit=NATIVE_HEAD, sections=FULL, assumed=_SWIFT,
    ),
    Point(
        model="Qwen3-30B-A3B", where=f"{SWIFT}, moe/qwen3_moe_offload.sh", measured=75 * GIB, whole=True, world=4,
        parallel={"expert": 4}, tokens=8192, batch=16, logit=NATIVE_HEAD, sections=CPU_ADAM, assumed=_SWIFT,
    ),
    Point(
        model="Moonlight-16B-A3B", where=f"{SWIFT}, moe/deepseek_v3.sh", measured=60 * GIB, whole=True, world=8,
        parallel={"pipeline": 2, "expert": 4, "last_stage_layers": 13}, tokens=8192, batch=16, logit=NATIVE_HEAD,
        sections=FULL, assumed=_SWIFT,
    ),
    Point(
        model="Qwen3-30B-A3B", where=f"{SWIFT}, mcore_bridge/full/moe.sh", measured=76 * GIB, whole=True, world=8,
        parallel={"tensor": 4, "pipeline": 2, "expert": 4, "first_stage_layers": 25}, tokens=8192, batch=4,
        logit=NATIVE_HEAD, sections=FULL, assumed=_SWIFT,
    ),
)  # fmt: skip


def configuration(point: Point) -> Config:
    """The point's run in our keys, as far as memory depends on them."""
    p = point.parallel
    data = point.world // (p.get("tensor", 1) * p.get("pipeline", 1))
    policy = {"micro_batch_tokens": point.tokens, "optimizer": {"lr": 1e-6}} | point.sections.get("policy", {})
    return Config.model_validate(
        {
            "run": {"name": "point", "out": "runs/point", "steps": 1},
            "model": {"path": point.model},
            "parallel": {**p, "data": data},
            "precision": point.sections.get("precision", {}),
            "policy": policy,
            "rollout": {
                "prompts_per_step": point.batch // 2,
                "samples_per_prompt": 2,
                "max_context": point.tokens,
                "sampling": {"max_tokens_per_turn": 64, "max_turns": 2},
            },
            "data": {"tasks": "embedded"},
        }
    )


def predicted(point: Point) -> float:
    """Bytes of the rank that needs most."""
    model, config = read_model(MODELS[point.model]), configuration(point)
    imbalance = 1.0 if point.balanced else phases.IMBALANCE
    return max(
        _bytes(point, config, model, stage, trainer_memory(config, model, stage, imbalance))
        for stage in range(config.parallel.pipeline)
    )


def _bytes(point: Point, config: Config, model: Model, stage: int, memory: TrainerMemory) -> float:
    parallel = config.parallel
    if stage == parallel.pipeline - 1:
        local = point.tokens // parallel.context
        logits = point.logit * local * model.vocab // parallel.tensor
        memory = replace(memory, head=logits + 2 * 2 * model.hidden * local)
    if point.optimizer is not None:
        memory = replace(memory, optimizer=int(memory.elements.shards * point.optimizer))
    if point.stored is not None:
        memory = replace(memory, parameters=memory.parameters - (2 - point.stored) * memory.elements.linear)
    total = float(sum(memory.states.values()) + sum(memory.passing.values()))
    if point.whole:
        total += phases.CONTEXT + phases.FRAGMENTS * total
        total += phases.COMMUNICATOR * phases.communicators(model, parallel)
    return total


HOST_MEASURED = 102.4 * GB
"""Resident memory of each of eight ranks when the host's 1,007 GB were full (THUDM/slime issue 1851)."""


def host_predicted() -> float:
    """Bytes of host memory of a rank of that run: Qwen3-30B-A3B on 8 GPUs, the optimizer on the CPU.

    Assumed are the layout of slime's script for this model (TP4 EP8), gradients that are offloaded as well, and copies
    of the actor's and of the reference's weights.
    """
    point = Point(
        model="Qwen3-30B-A3B", where="", measured=HOST_MEASURED, whole=False, world=8,
        parallel={"tensor": 4, "expert": 8}, tokens=8192, batch=256, logit=0, sections=CPU_ADAM,
    )  # fmt: skip
    memory = trainer_memory(configuration(point), read_model(MODELS[point.model]), 0)
    offloaded = memory.parameters + memory.gradients
    return memory.host_optimizer + offloaded + 2 * memory.parameters + phases.RANK_PROCESS


def layout(point: Point) -> str:
    """The layout in short, such as ``TP2 PP4 EP8``."""
    names = {"tensor": "TP", "pipeline": "PP", "virtual": "VPP", "expert": "EP"}
    kept = "full recompute" if point.sections.get("policy", {}).get("recompute") == "full" else ""
    offload = "CPU Adam" if "optimizer" in point.sections.get("policy", {}) else ""
    fp8 = "FP8" if "recipe" in point.sections.get("precision", {}) else ""
    sizes = [f"{names[key]}{value}" for key, value in point.parallel.items() if key in names]
    ranks = " ".join([*sizes, f"on {point.world}"])
    return ", ".join(filter(None, [ranks, f"{point.tokens // 1024}K", kept, offload, fp8]))


def table() -> str:
    """The points with prediction and error, as Markdown."""
    lines = [
        "| model | layout | published | computed | error | source | assumed |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in POINTS:
        unit, name = (GIB, "GiB") if point.whole else (GB, "GB")
        found = predicted(point)
        lines.append(
            f"| {point.model} | {layout(point)} | {point.measured / unit:.3g} {name} | {found / unit:.3g} {name} | "
            f"{100 * (found / point.measured - 1):+.0f} % | {point.where} | {point.assumed} |"
        )
    found = host_predicted()
    lines.append(
        f"| Qwen3-30B-A3B | host memory of a rank, TP4 EP8 on 8, CPU Adam | {HOST_MEASURED / GB:.3g} GB | "
        f"{found / GB:.3g} GB | {100 * (found / HOST_MEASURED - 1):+.0f} % | THUDM/slime issue 1851 | "
        f"layout of slime's script; gradients offloaded; copies of the actor's and of the reference's weights |"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(table(), end="")
