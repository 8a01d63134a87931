"""Qwen3-8B's layers, forward and backward through the trainer: MFU against the matrix product measured here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from battery import shapes, variants
from battery.hardware import GIB, NO_ENGINE
from battery.results import Report, Request, Sink
from megatron_fleet.algorithms.losses import sft_loss
from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.models.hf_config import read_model

if TYPE_CHECKING:
    from megatron_fleet.trainer.megatron.policy import MegatronPolicy

LAYERS = 4
GOAL_TOKENS = {"full": 32768, "tiny": 256}
TOKENS = {"full": (32768, 8192, 16384, 4096, 65536), "tiny": (256, 512)}
"""In order of interest; the largest, which may not fit, last."""
LONGEST = {"full": 8192, "tiny": 128}
"""Tokens of a sequence; an agent's episodes have about 10,000."""
REPEATS = {"full": 5, "tiny": 1}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"kernels": "auto"},
    "fp8_blockwise": {"recipe": "fp8_blockwise"},
    "bf16, no TE": {"kernels": "torch"},
    "fp8_tensorwise": {"recipe": "fp8_tensorwise"},
    "fp8_delayed": {"recipe": "fp8_delayed"},
}
"""All but ``no TE`` need Transformer Engine."""


def measure(report: Report, request: Request) -> None:
    """Each variant in a process of its own; those that need Transformer Engine only where it is."""
    problem = os.environ[NO_ENGINE]
    for name, settings in VARIANTS.items():
        if problem and settings.get("kernels") != "torch":
            report.leave_out(name, problem)
            continue
        common = {"size": request.size, "scratch": request.scratch, "name": name}
        variants.run(report, __name__, name, {**common, **settings})
        summarise(report, request.size)


def variant(sink: Sink, settings: Mapping[str, Any]) -> None:
    """Rows of the table ``speed`` of one variant."""
    size, name, kernels = settings["size"], settings["name"], settings.get("kernels", "auto")
    peak = shapes.matrix_tflops(size)
    sink.figures(matrix_tflops=peak)
    hf = shapes.model_config(size, LAYERS, shapes.SMALL_VOCABULARY)
    precision = {"recipe": settings["recipe"]} if "recipe" in settings else {}
    with tempfile.TemporaryDirectory(dir=settings["scratch"]) as folder:
        model = shapes.write_config(Path(folder), hf)
        config = shapes.run_config(model, max(TOKENS[size]), precision=precision, policy={"kernels": kernels})
        policy = shapes.make_policy(config)
    for tokens, longest in lengths(size, name):
        sink.doing(f"{name}, {tokens} tokens in sequences of {longest}")
        try:
            row = step_row(policy, tokens, longest, REPEATS[size])
        except torch.OutOfMemoryError:
            sink.leave_out(
                f"{name}, {tokens} tokens in sequences of {longest}", "does not fit into the device's memory"
            )
            break
        sink.row("speed", variant=name, **row, share=round(row["tflops"] / peak, 4))
    policy.close()


def lengths(size: str, name: str) -> list[tuple[int, int]]:
    """Packed tokens and the longest sequence of each measurement; BF16 also meets one sequence of all tokens."""
    packed = [(tokens, min(tokens, LONGEST[size])) for tokens in TOKENS[size]]
    most = max(TOKENS[size])
    return [*packed, (most, most)] if name.startswith("bf16") else packed


def step_row(policy: MegatronPolicy, tokens: int, longest: int, repeats: int) -> dict[str, Any]:
    """Time of forward and backward of one micro-batch, and FLOP/s without the recomputed ones."""
    micro_batch = shapes.random_data(tokens, longest, policy.vocab_size)

    def step() -> None:
        policy.forward_backward([micro_batch], sft_loss)

    peak = shapes.peak_bytes(step)
    seconds = shapes.median_seconds(step, repeats)
    policy.discard_gradients()
    sizes = [len(datum) for datum in micro_batch]
    cost = SequenceCost.of(read_model(policy.hf_config))
    flops = 3 * float(cost(sizes, [n - 1 for n in sizes]).sum())
    return {
        "tokens": tokens,
        "longest": longest,
        "ms": shapes.finite(1e3 * seconds),
        "tokens_per_s": round(tokens / seconds),
        "tflops": shapes.finite(flops / seconds / 1e12),
        "extra_gib": None if peak is None else round(peak / GIB, 2),
    }


def summarise(report: Report, size: str) -> None:
    """Figures from the rows so far."""
    wanted = (GOAL_TOKENS[size], LONGEST[size])
    at_goal = {row["variant"]: row for row in report.rows("speed") if (row["tokens"], row["longest"]) == wanted}
    with_engine, without = at_goal.get("bf16"), at_goal.get("bf16, no TE")
    plain = [row for row in (with_engine, without) if row is not None]
    if not plain:
        return
    best = max(plain, key=lambda row: row["tokens_per_s"])
    report.figures(bf16_share=best["share"])
    if with_engine and without:
        report.figures(torch_slowdown=round(with_engine["tokens_per_s"] / without["tokens_per_s"], 3))
    if fp8 := [row for name, row in at_goal.items() if name.startswith("fp8")]:
        fastest = max(fp8, key=lambda row: row["tokens_per_s"])
        speedup = round(fastest["tokens_per_s"] / best["tokens_per_s"], 3)
        report.figures(fp8_speedup=speedup, fp8_recipe=fastest["variant"])
