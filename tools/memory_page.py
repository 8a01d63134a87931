"""Fill in the tables of ``docs/understand/memory.md`` and draw its picture. Usage: python tools/memory_page.py"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import memory_points  # noqa: E402

from megatron_fleet.config.load import load  # noqa: E402
from megatron_fleet.config.schema import Config, ParallelConfig  # noqa: E402
from megatron_fleet.planning.memory import engine_memory, phases  # noqa: E402
from megatron_fleet.planning.memory.engine_memory import GIB  # noqa: E402
from megatron_fleet.planning.memory.phases import H100_BYTES, RunMemory, run_memory  # noqa: E402
from megatron_fleet.telemetry.charts import Chart, Series, write_svg  # noqa: E402
from megatron_fleet.weights.random_model import QWEN3_0_6B  # noqa: E402

PAGE = ROOT / "docs" / "understand" / "memory.md"
PICTURE = PAGE.with_suffix(".svg")
LONG = "qwen3_8b_fleet"
QWEN3_8B = memory_points.MODELS["Qwen3-8B"]
EXPERIMENTS: Mapping[str, Mapping[str, Any]] = {
    LONG: QWEN3_8B,
    f"{LONG}_2node": QWEN3_8B,
    f"{LONG}_fp8_kv": QWEN3_8B,
    "qwen3_8b_bench": QWEN3_8B,
    "qwen3_30b_a3b_fleet": memory_points.MODELS["Qwen3-30B-A3B"],
    "qwen3_32b_fleet": memory_points.MODELS["Qwen3-32B"],
    "moonlight_16b_fleet": memory_points.MODELS["Moonlight-16B-A3B"],
    "glm_4_7_flash_fleet": memory_points.MODELS["GLM-4.7-Flash"],
    "gpu_smoke": QWEN3_0_6B,
}
RECOMPUTE: tuple[Literal["none", "full"], ...] = ("none", "full")
PHASES = ("train", "checkpoint", "sync", "roll")
LAYOUTS = (
    ("tensor 1, data 8", ParallelConfig(tensor=1, data=8)),
    ("tensor 2, data 4", ParallelConfig(tensor=2, data=4)),
    ("tensor 4, data 2", ParallelConfig(tensor=4, data=2)),
    ("tensor 4, context 2", ParallelConfig(tensor=4, context=2)),
)


@cache
def composed(experiment: str) -> Config:
    """An experiment's configuration; composing takes longer than computing."""
    return load([f"experiment={experiment}", "model.path=/model"])


def memory_of(experiment: str) -> RunMemory:
    """Memory of an experiment on GPUs of an H100's size."""
    return run_memory(composed(experiment), EXPERIMENTS[experiment])


def experiments() -> str:
    """Phases of each experiment, its host memory and the room for sequences."""
    lines = [f"| experiment | {' | '.join(PHASES)} | host | KV tokens per engine | sequences |", "|---" * 8 + "|"]
    for name in EXPERIMENTS:
        memory = memory_of(name)
        totals = {phase.name: phase.total for phase in memory.devices[0].phases}
        cells = [*(f"{totals[phase] / GIB:.1f}" for phase in PHASES), f"{sum(memory.host.values()) / GIB:.0f}"]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {memory.kv_tokens:,} | {memory.sequences:.1f} |")
    return "\n".join(lines)


def parts() -> str:
    """Every part of every phase of one experiment."""
    found = {phase.name: phase.parts for phase in memory_of(LONG).devices[0].phases}
    names = dict.fromkeys(part for phase in PHASES for part in found[phase])
    lines = [f"| GiB | {' | '.join(PHASES)} |", "|---" * 5 + "|"]
    for part in names:
        sizes = [found[phase].get(part, 0) for phase in PHASES]
        if any(sizes):
            lines.append(f"| {part} | {' | '.join(f'{size / GIB:.1f}' if size else '' for size in sizes)} |")
    totals = [f"**{sum(found[phase].values()) / GIB:.1f}**" for phase in PHASES]
    return "\n".join([*lines, f"| together | {' | '.join(totals)} |"])


def layouts() -> str:
    """Training phase of Qwen3-8B on eight GPUs, by layout and length."""
    lines = ["| GiB | 32K, no recompute | 32K, full | 64K, no recompute | 64K, full |", "|---" * 5 + "|"]
    for name, layout in LAYOUTS:
        cells = [f"{train(tokens, recompute, layout):.1f}" for tokens in (32768, 65536) for recompute in RECOMPUTE]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def train(tokens: int, recompute: Literal["none", "full"], layout: ParallelConfig) -> float:
    """GiB of the training phase."""
    config = composed(LONG)
    policy = config.policy.model_copy(update={"micro_batch_tokens": tokens, "recompute": recompute})
    changed = config.model_copy(update={"policy": policy, "parallel": layout})
    return run_memory(changed, QWEN3_8B).devices[0].phases[0].total / GIB


def estimates() -> str:
    """Constants that nothing computes."""
    rows = {
        "CUDA context, kernels and libraries, per process": f"{phases.CONTEXT / GIB:.1f} GiB",
        "an NCCL communicator": f"{phases.COMMUNICATOR / GIB:.2f} GiB",
        "fragments": f"{phases.FRAGMENTS:.0%} of states and activations",
        "tokens of the busiest expert-parallel rank": f"{phases.IMBALANCE:g} × the mean",
        "CUDA graphs of an engine": f"{engine_memory.GRAPHS / GIB:.0f} GiB",
        "saving, in addition to the state": f"{phases.CHECKPOINT_DEVICE / GIB:.1f} GiB",
        "saving, on the host": f"{phases.CHECKPOINT_HOST / GIB:.0f} GiB",
        "process of a rank, on the host": f"{phases.RANK_PROCESS / GIB:.0f} GiB",
        "process of an engine, and of each of its devices": f"{phases.ENGINE_PROCESS / GIB:.0f} + "
        f"{phases.ENGINE_WORKER / GIB:.0f} GiB",
        "an episode worker": f"{phases.WORKER / GIB:.1f} GiB",
        "controller, Ray, object store": f"{phases.SERVICES / GIB:.0f} GiB",
        "left free by the experiments": f"{phases.RESERVE / GIB:.1f} GiB",
    }
    return "\n".join(["| estimate | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


TABLES = {
    "experiments": experiments,
    "parts": parts,
    "layouts": layouts,
    "published": lambda: memory_points.table().rstrip(),
    "estimates": estimates,
}


def page(text: str) -> str:
    """Return the page with its tables made anew. Each stands between ``<!-- table: NAME -->`` and ``<!-- end -->``."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def draw(path: Path) -> None:
    """Draw the training phase over the length of a micro-batch."""
    lengths = range(4, 65, 4)
    lines = [
        Series(
            f"{name}, {recompute if recompute == 'full' else 'no'} recompute",
            tuple((float(k), round(train(1024 * k, recompute, layout), 2)) for k in lengths),
        )
        for name, layout in LAYOUTS[1:3]
        for recompute in RECOMPUTE
    ]
    lines.append(Series("an H100 of 80 GB", ((4.0, H100_BYTES / GIB), (64.0, H100_BYTES / GIB))))
    title = "GiB per GPU while Qwen3-8B trains on 8 GPUs, by thousands of tokens in a micro-batch"
    write_svg(path, "Memory of training", [Chart(title, tuple(lines))])


def main() -> None:
    """Write page and picture."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PICTURE)


if __name__ == "__main__":
    main()
