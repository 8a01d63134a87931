"""Layers that were timed on a GPU by this project (`benchmarks/gpu/run.py`), against `cluster.planning` and
`cluster.memory`. Prints a Markdown table.

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

from megatron_fleet.cluster.memory.engine import GIB
from megatron_fleet.cluster.memory.phases import trainer_memory
from megatron_fleet.cluster.planning.hardware import GPUS
from megatron_fleet.cluster.planning.shapes import KNOWN
from megatron_fleet.cluster.planning.training import training_time
from megatron_fleet.cluster.planning.workload import Workload
from megatron_fleet.config.schema import Config
from megatron_fleet.models.hf_config import read_model

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


def points() -> Iterator[Point]:
    """All measured rows, of each GPU."""
    for path in sorted(RESULTS.glob("*/layers.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        name = next(gpu for gpu in GPUS if f" {gpu}" in f" {result['machine']['device']}")
        seen = set()
        for row in result["tables"]["speed"]:
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
    config = Config.model_validate(
        {
            "run": {"name": "layers", "out": "runs/layers", "steps": 1},
            "model": {"path": "Qwen/Qwen3-8B", "dtype": "bfloat16"},
            "precision": {"recipe": recipe},
            "policy": {
                "micro_batch_tokens": row["tokens"],
                "kernels": "torch" if row["variant"].endswith("no TE") else "auto",
                "optimizer": {"lr": 1e-6},
            },
            "rollout": {
                "max_context": row["tokens"],
                "prompts_per_step": 1,
                "samples_per_prompt": 2,
                "sampling": {"max_tokens_per_turn": 16, "max_turns": 1},
            },
            "data": {"tasks": "embedded"},
        }
    )
    model, episodes = read_model(hf), row["tokens"] // row["longest"]
    load = Workload(episodes=episodes, mean=row["longest"], longest=row["longest"], sampled=1.0, sigma=1e-9)
    parts = training_time(config, model, GPUS[gpu], load)
    passes = sum(seconds for name, seconds in parts.items() if name not in OUTSIDE)
    memory = trainer_memory(config, model, 0).passing
    return passes, sum(nbytes for part, nbytes in memory.items() if not (again and part == "FP8 weights"))


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
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(table())


if __name__ == "__main__":
    main()
