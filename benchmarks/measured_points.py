"""Layers and engines that were timed on a GPU by this project (`benchmarks/gpu/run.py`), against `planning` and
`planning.memory`. Prints Markdown tables.

The constants of the time model were chosen by what others published, before these figures: the errors are of a
prediction. Only those of PyTorch's layers were chosen by them.

    python benchmarks/measured_points.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fleet.config.schema import Config
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.planning.hardware import GPUS
from megatron_fleet.planning.memory.engine_memory import GIB
from megatron_fleet.planning.memory.phases import trainer_memory
from megatron_fleet.planning.rollout import CONTEXT_SHARE, Engine
from megatron_fleet.planning.shapes import KNOWN
from megatron_fleet.planning.training import training_time
from megatron_fleet.planning.workload import Workload

RESULTS = Path(__file__).parent / "results" / "gpu"
LAYERS, VOCABULARY = 4, 1024
"""Shape that the part ``layers`` of ``benchmarks/gpu/run.py`` measures: Qwen3-8B's width, few layers, and a vocabulary
so small that the output layer costs almost nothing."""
OUTSIDE = ("optimizer", "gradients", "other")
"""Parts of a planned step that are not its forward and backward passes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One micro-batch.

    Attributes:
        measured, planned: seconds of its forward and backward pass.
        measured_gib, planned_gib: device memory that it takes beyond parameters, gradients and states.
    """

    gpu: str
    variant: str
    tokens: int
    longest: int
    measured: float
    planned: float
    measured_gib: float
    planned_gib: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decoding steps of an engine with Qwen3-8B in BF16.

    Attributes:
        sequences: that it decodes at once.
        context: tokens of each, halfway.
        measured, planned: seconds of a step.
    """

    gpu: str
    graphs: bool
    sequences: int
    context: float
    measured: float
    planned: float


def results(part: str) -> Iterator[tuple[str, dict[str, list[dict[str, Any]]]]]:
    """The tables of a part, of each GPU on which it was measured."""
    for path in sorted(RESULTS.glob(f"*/{part}.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        yield next(gpu for gpu in GPUS if f" {gpu}" in f" {result['machine']['device']}"), result["tables"]


def decoding() -> Iterator[Decoding]:
    """All measured rows, of each GPU."""
    for name, tables in results("engine"):
        for row in tables["throughput"]:
            count, graphs, context = row["sequences"], row["graphs"] == "yes", row["prompt"] + row["sampled"] / 2
            seconds = decoding_s(name, count, context, graphs=graphs)
            yield Decoding(name, graphs, count, context, row["ms_per_token"] / 1e3, seconds)


def decoding_s(gpu: str, sequences: int, context: float, *, graphs: bool) -> float:
    """Seconds of a decoding step by the plan, without prompts beside it."""
    rollout = {
        "engine": {"enforce_eager": not graphs, "max_num_seqs": sequences},
        "episodes_in_flight": sequences,
    }
    config = _config({"micro_batch_tokens": 4096}, 4096, rollout)
    hf = KNOWN["Qwen3-8B"]
    load = Workload(episodes=sequences, mean=context / CONTEXT_SHARE, longest=4096, sampled=1.0, sigma=1e-9)
    return Engine.of(config, hf, read_model(hf), GPUS[gpu], load).step_s(sequences)


def points() -> Iterator[Point]:
    """All measured rows, of each GPU."""
    for name, tables in results("layers"):
        seen = set()
        for row in tables["speed"]:
            seconds, nbytes = planned(name, row, again=row["variant"] in seen)
            seen.add(row["variant"])
            yield Point(
                name, row["variant"], row["tokens"], row["longest"], row["ms"] / 1e3, seconds, row["extra_gib"],
                nbytes / GIB,
            )  # fmt: skip


def planned(gpu: str, row: dict[str, Any], again: bool) -> tuple[float, int]:
    """Seconds and bytes of a measured row's micro-batch by the plan.

    Args:
        again: the same layers have had a micro-batch before, so weights in FP8 are there already.
    """
    hf = KNOWN["Qwen3-8B"] | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    recipe = row["variant"] if row["variant"].startswith("fp8") else "model_dtype"
    kernels = "torch" if row["variant"].endswith("no TE") else "auto"
    policy = {"micro_batch_tokens": row["tokens"], "kernels": kernels}
    config = _config(policy, row["tokens"], precision={"recipe": recipe})
    model, episodes = read_model(hf), row["tokens"] // row["longest"]
    load = Workload(episodes=episodes, mean=row["longest"], longest=row["longest"], sampled=1.0, sigma=1e-9)
    parts = training_time(config, model, GPUS[gpu], load)
    passes = sum(seconds for name, seconds in parts.items() if name not in OUTSIDE)
    memory = trainer_memory(config, model, 0).passing
    return passes, sum(nbytes for part, nbytes in memory.items() if not (again and part == "FP8 weights"))


def _config(
    policy: dict[str, Any], context: int, rollout: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    """A configuration with what is measured, and as little else as one may have."""
    usual = {"prompts_per_step": 1, "samples_per_prompt": 2, "max_context": context}
    return Config.model_validate(
        {
            "run": {"name": "measured", "out": "runs/measured", "steps": 1},
            "model": {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"},
            "policy": {**policy, "optimizer": {"lr": 1e-6}},
            "rollout": {**usual, "sampling": {"max_tokens_per_turn": 16, "max_turns": 1}, **(rollout or {})},
            "data": {"tasks": "embedded"},
            **sections,
        }
    )


def decoding_table() -> str:
    """Every measured decoding step with its error."""
    head = ["GPU", "graphs", "sequences", "context", "ms of a step", "planned", "error"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for p in decoding():
        cells = [p.gpu, "yes" if p.graphs else "no", f"{p.sequences:,}", f"{p.context:,.0f}"]
        cells += [f"{1e3 * p.measured:.2f}", f"{1e3 * p.planned:.2f}", f"{p.planned / p.measured - 1:+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table() -> str:
    """Every point with its errors."""
    head = ["GPU", "layers", "packed tokens", "longest", "ms", "planned", "error", "GiB", "planned", "error"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for p in points():
        cells = [p.gpu, p.variant, f"{p.tokens:,}", f"{p.longest:,}", f"{1e3 * p.measured:.0f}"]
        cells += [f"{1e3 * p.planned:.0f}", f"{p.planned / p.measured - 1:+.0%}", f"{p.measured_gib:.1f}"]
        cells += [f"{p.planned_gib:.1f}", f"{p.planned_gib / p.measured_gib - 1:+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{table()}\n\n{decoding_table()}")


if __name__ == "__main__":
    main()
