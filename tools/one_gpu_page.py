"""Fill in the table of ``docs/run/one-gpu.md``: models that train on one GPU. Usage: python tools/one_gpu_page.py"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.schema import Config
from megatron_fleet.planning.hardware import GPUS, Gpu
from megatron_fleet.planning.memory.phases import run_memory
from megatron_fleet.planning.plan import why_not
from megatron_fleet.planning.shapes import KNOWN

PAGE = Path(__file__).resolve().parents[1] / "docs" / "run" / "one-gpu.md"
GIB = 1 << 30
MODELS = ("Qwen3-0.6B", "Qwen3-4B", "Qwen2.5-7B", "Qwen3-8B", "Qwen3.5-9B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B")
COLUMNS = {"L4, A10": "A10", "4090": "4090", "L40S": "L40S", "A100, H100": "H100", "H200": "H200", "B200": "B200"}
BASE = (
    "experiment=gpu_smoke", "rollout.max_context=8192", "policy.micro_batch_tokens=8192",
    "rollout.episodes_in_flight=8", "rollout.engine.gpu_memory_utilization=0.85",
)  # fmt: skip
SMALL = ("policy.recompute=full", "policy.optimizer.moments=bfloat16", "precision.gradients=bfloat16")
WAYS = {
    "all": (),
    "recompute": SMALL[:1],
    "small states": SMALL,
    "offload": (*SMALL, "policy.optimizer.offload_fraction=1"),
    "LoRA": (*SMALL[:1], "policy.lora.rank=16"),
}
"""Settings that are tried, in this order."""


@cache
def composed(settings: tuple[str, ...]) -> Config:
    """Return the configuration of a way; composing takes longer than computing."""
    return load([*BASE, *settings, "model.path=/model"])


def way(model: str, gpu: Gpu) -> str:
    """Return the first way in which a model trains on the GPU, and the GiB of host memory that it takes."""
    for name, settings in WAYS.items():
        config = composed(settings)
        try:
            memory = run_memory(config, KNOWN[model], gpu.memory)
        except UserError:
            continue
        if why_not(config, KNOWN[model], gpu, memory) is None and memory.kv_tokens >= config.rollout.max_context:
            return f"{name}, {sum(memory.host.values()) / GIB:.0f}"
    return "–"


def table() -> str:
    """The models and GPUs."""
    names = [f"{label} ({GPUS[name].memory / GIB:.0f} GiB)" for label, name in COLUMNS.items()]
    lines = [f"| model | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for model in MODELS:
        lines.append(f"| {model} | {' | '.join(way(model, GPUS[name]) for name in COLUMNS.values())} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with its table made anew."""
    return re.sub(
        r"<!-- table: models -->\n.*?<!-- end -->",
        lambda _: f"<!-- table: models -->\n\n{table()}\n\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
