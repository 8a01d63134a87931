"""Step times that others have published, against `planning`. Prints a Markdown table.

Figures are seconds of a step, or of a phase, averaged over several steps; layouts and batches are those of the
recipes at the release. The constants of `planning.training` and `rollout` are the same for all
points. They were chosen with these points in sight: the errors say how well one set of constants describes them all,
not what the error of a new run will be.

    python benchmarks/step_points.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_fleet.config.schema import Config
from megatron_fleet.models.hf_config import drop_quantization, read_model
from megatron_fleet.planning.hardware import GPUS
from megatron_fleet.planning.shapes import KNOWN
from megatron_fleet.planning.step import StepTime, step_time
from megatron_fleet.planning.workload import Workload

PROMPT = 150
"""Tokens of a prompt of OpenMathInstruct-2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run whose step time was published.

    Attributes:
        parallel: layout of the trainer in our keys; ``data`` follows from ``ranks``.
        ranks, engines: GPUs of the trainer; number of engines and their GPUs each.
        episodes, mean, longest: episodes of a step, their mean and their largest length.
        updates: optimizer steps of a batch.
        measured: seconds by phase, ``step`` for the whole.
        sync: seconds of their weight sync, published apart; it stands in the place of ours, which sends in another way.
    """

    name: str
    model: str
    where: str
    ranks: int
    parallel: Mapping[str, int]
    engines: tuple[int, int]
    episodes: int
    mean: float
    longest: int
    updates: int
    measured: Mapping[str, float]
    colocated: bool = True
    recompute: bool = False
    staleness: int = 0
    fp8: bool = False
    utilization: float = 0.6
    gpu: str = "H100"
    prompt: int = PROMPT
    sync: float = 0.0


NEMO6, NEMO5 = "NeMo RL 0.6, performance-summary", "NeMo RL 0.5, performance-summary"
ISSUE = "NeMo RL issue 959"
_8B = {"model": "Llama-3.1-8B", "sync": 5.0, "episodes": 2048, "longest": 4096, "recompute": True, "updates": 4}
_30B = {"model": "Qwen3-30B-A3B", "sync": 1.0, "episodes": 2048, "longest": 4096, "updates": 4, "where": NEMO6}
_32B = {"model": "Qwen3-32B", "sync": 5.0, "episodes": 2048, "longest": 4096, "updates": 4, "where": NEMO5}
_32B |= {"parallel": {"tensor": 4, "pipeline": 4}}
_235B = {
    "model": "Qwen3-235B-A22B",
    "sync": 4.7,
    "episodes": 512,
    "longest": 8192,
    "updates": 1,
    "where": NEMO6,
    "recompute": True,
}
_STAGES = {"first_stage_layers": 11, "last_stage_layers": 11}
_V3 = {
    "model": "DeepSeek-V3",
    "sync": 8.8,
    "episodes": 512,
    "longest": 1536,
    "updates": 1,
    "where": NEMO6,
    "recompute": True,
}
_V3 |= {"parallel": {"pipeline": 16, "expert": 16, "first_stage_layers": 3, "last_stage_layers": 2}}
_OFF = {"colocated": False, "staleness": 1, "utilization": 0.8}
RUNS: tuple[Run, ...] = (
    Run(name="8B, one node", **_8B, where=ISSUE, ranks=8, parallel={"pipeline": 2}, engines=(8, 1), mean=945,
        measured={"step": 112, "training": 28, "rollout": 58, "log-probs": 18}),
    Run(name="70B, eight nodes", **(_8B | {"model": "Llama-3-70B", "sync": 14.0}), where=ISSUE, ranks=64,
        parallel={"tensor": 4, "pipeline": 4}, engines=(8, 8), mean=548,
        measured={"step": 147, "training": 28, "rollout": 84, "log-probs": 18}),
    Run(name="8B, two nodes", **_8B, where=NEMO5, ranks=16, parallel={"pipeline": 2}, engines=(16, 1), mean=1019,
        measured={"step": 92.8}),
    Run(name="8B, one step off", **(_8B | _OFF), where=NEMO5, ranks=8, parallel={}, engines=(8, 1), mean=1123,
        measured={"step": 64.8}),
    Run(name="8B, one step off, FP8", **(_8B | _OFF), where=NEMO5, ranks=8, parallel={}, engines=(8, 1), mean=1128,
        fp8=True, measured={"step": 53.0}),
    Run(name="30B-A3B, four nodes", **_30B, ranks=32, parallel={"expert": 8}, engines=(16, 2), mean=3203,
        measured={"step": 192}),
    Run(name="30B-A3B, one step off", **(_30B | _OFF), ranks=16, parallel={"pipeline": 2, "expert": 8}, engines=(8, 2),
        mean=3201, measured={"step": 152}),
    Run(name="30B-A3B, eight steps off", **(_30B | _OFF | {"staleness": 8}), ranks=128, parallel={"expert": 8},
        engines=(32, 2), mean=3206, measured={"step": 34.5}),
    Run(name="32B, four nodes", **_32B, ranks=32, engines=(8, 4), mean=3251, measured={"step": 376}),
    Run(name="32B, one step off", **(_32B | _OFF), ranks=32, engines=(8, 4), mean=3252, measured={"step": 200}),
    Run(name="235B-A22B, 16 nodes", **_235B, ranks=128, engines=(8, 16), mean=5698,
        parallel={"tensor": 2, "context": 2, "pipeline": 8, "expert": 16, **_STAGES}, measured={"step": 395}),
    Run(name="235B-A22B, 32 nodes", **_235B, ranks=256, engines=(16, 16), mean=5713,
        parallel={"tensor": 2, "context": 2, "pipeline": 8, "expert": 16, **_STAGES}, measured={"step": 312}),
    Run(name="235B-A22B, one step off", **(_235B | _OFF | {"utilization": 0.88}), ranks=128, engines=(16, 8), mean=5721,
        parallel={"tensor": 4, "pipeline": 8, "expert": 16, **_STAGES}, measured={"step": 231}),
    Run(name="DeepSeek-V3, 32 nodes", **_V3, ranks=256, engines=(8, 32), mean=701, measured={"step": 134}),
    Run(name="DeepSeek-V3, 64 nodes", **_V3, ranks=512, engines=(16, 32), mean=697, measured={"step": 111}),
    Run(name="DeepSeek-V3, one step off", **(_V3 | _OFF), ranks=256, engines=(8, 32), mean=710,
        measured={"step": 64.1}),
    Run(name="DeepSeek-V3, one step off, FP8", **(_V3 | _OFF), ranks=256, engines=(16, 16), mean=721, fp8=True,
        measured={"step": 59.2}),
)  # fmt: skip


def configuration(run: Run) -> Config:
    """The run in our keys, as far as its time depends on them."""
    data = run.ranks
    for name in ("tensor", "pipeline", "context"):
        data //= run.parallel.get(name, 1)
    return Config.model_validate(
        {
            "run": {"name": "point", "out": "runs/point", "steps": 1},
            "model": {"path": run.model},
            "parallel": {**run.parallel, "data": data},
            "precision": {"recipe": "fp8_blockwise"} if run.fp8 else {},
            "policy": {
                "micro_batch_tokens": run.longest,
                "recompute": "full" if run.recompute else "none",
                "updates_per_batch": run.updates,
                "optimizer": {"lr": 1e-6},
            },
            "algorithm": {"kl": {"coef": 0.01}},
            "rollout": {
                "prompts_per_step": run.episodes // 2,
                "samples_per_prompt": 2,
                "max_context": run.longest,
                "max_staleness": run.staleness,
                "episodes_in_flight": run.episodes * max(1, run.staleness),
                "sampling": {"max_tokens_per_turn": run.longest - 64, "max_turns": 1},
                "engine": {
                    "replicas": run.engines[0],
                    "tensor_parallel": run.engines[1],
                    "colocated": run.colocated,
                    "gpu_memory_utilization": run.utilization,
                },
            },
            "data": {"tasks": "embedded"},
            "checkpoint": {"interval": 0},
        }
    )


def predicted(run: Run) -> StepTime:
    """The step as it is planned for their vLLM; log-probs of the old policy are always computed there.

    Host and device take turns in it. Asynchronous scheduling became vLLM's default (pull request 27614) after those of
    NeMo RL 0.3 to 0.5, 0.9 to 0.11.2. NeMo RL 0.6 has vLLM 0.17.1 and gives engines of several GPUs, as all of its here
    are, the executor of Ray, which got it with RayExecutorV2 (pull request 36836).
    """
    shape = dict(KNOWN[run.model])
    drop_quantization(shape)  # weights are converted to bfloat16 before training
    load = Workload(
        episodes=run.episodes, mean=run.mean, longest=run.longest, sampled=1 - run.prompt / run.mean, turns=1,
        tool_s=0.0, start_s=0.0,
    )  # fmt: skip
    how = {"old_pass": True, "overlapped": False}
    step = step_time(configuration(run), shape, read_model(shape), GPUS[run.gpu], load, **how)
    return replace(step, phases={**step.phases, "weight sync": {"published": run.sync}})


def seconds(step: StepTime, phase: str) -> float:
    """Seconds of a phase of a publication."""
    if phase == "step":
        return step.total
    names = ("old log-probs", "reference log-probs") if phase == "log-probs" else (phase,)
    return sum(step.seconds(name) for name in names)


def errors() -> dict[tuple[str, str], float]:
    """Relative error by run and phase."""
    found = {}
    for run in RUNS:
        step = predicted(run)
        found |= {(run.name, phase): seconds(step, phase) / value - 1 for phase, value in run.measured.items()}
    return found


def table() -> str:
    """The points with prediction and error, as Markdown."""
    lines = ["| run | GPUs | phase | published, s | computed, s | error | source |", "|---" * 7 + "|"]
    for run in RUNS:
        step = predicted(run)
        for phase, value in run.measured.items():
            found = seconds(step, phase)
            lines.append(
                f"| {run.name} | {step.devices} | {phase} | {value:g} | {found:.1f} | "
                f"{100 * (found / value - 1):+.0f} % | {run.where} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(table(), end="")
