"""vLLM as an engine of a run: start, sampling with and without graphs, and sleep level 2 again and again."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from battery import shapes
from battery.engines import Engine, random_prompts
from battery.hardware import GIB
from battery.results import Report, Request


@dataclass(frozen=True, slots=True)
class Sizes:
    """``batches``: sequences sampled at once, each with ``prompt`` and ``sampled`` tokens, ``repeats`` times."""

    layers: int
    batches: tuple[int, ...]
    prompt: int
    sampled: int
    repeats: int
    cycles: int


SIZES = {"full": Sizes(36, (16, 64, 128), 1024, 128, 3, 50), "tiny": Sizes(2, (1, 3), 16, 4, 1, 2)}
DUMMY = {"load_format": "dummy"}
"""Random weights made on the device: throughput does not depend on them."""


def measure(report: Report, request: Request) -> None:
    """With graphs first: start, sampling, sleep; then sampling the smallest batch without."""
    asyncio.run(_measure(report, request))


async def _measure(report: Report, request: Request) -> None:
    sizes = SIZES[request.size]
    hf = shapes.model_config(request.size, sizes.layers)
    folder = shapes.write_config(Path(request.scratch) / "model", hf)
    for graphs in (True, False):
        if not graphs and not shapes.cuda():
            report.leave_out("sampling without graphs", "a CPU has no graphs, so it was measured already")
            continue
        report.doing(f"starting the engine {'with' if graphs else 'without'} graphs")
        before = shapes.memory_used()
        settings: dict[str, Any] = {
            "colocated": True,  # it can sleep
            "enforce_eager": not graphs,
            "max_num_seqs": max(sizes.batches),
            "gpu_memory_utilization": 0.85,
            "start_timeout_s": max(60.0, report.seconds_left()),
        }
        config = shapes.run_config(folder, 4 * (sizes.prompt + sizes.sampled), engine=settings)
        engine = Engine(config, "cuda_ipc" if shapes.cuda() else "shm", Path(request.keep) / "engine.log", DUMMY)
        try:
            await engine.call("start")
            report.figures(**{"start_s" if graphs else "start_eager_s": round(engine.seconds["start"], 1)})
            batches = sizes.batches if graphs else sizes.batches[:1]
            await sampling(report, engine, sizes, batches, hf["vocab_size"], graphs)
            if graphs:
                await sleeping(report, engine, sizes.cycles, before)
        finally:
            engine.close()
    _speedup(report, sizes.batches[0])


async def sampling(
    report: Report, engine: Engine, sizes: Sizes, batches: Sequence[int], vocabulary: int, graphs: bool
) -> None:
    """Rows of the table ``throughput``. The first round, which compiles kernels, does not count."""
    for count in batches:
        report.doing(f"sampling {count} sequences at once")
        prompts = (random_prompts(count, sizes.prompt, vocabulary, seed) for seed in itertools.count(1000 * count))
        seconds: dict[int, list[float]] = {1: [], sizes.sampled: []}
        for _ in range(1 + sizes.repeats):
            for tokens, found in seconds.items():
                sampled = await engine.call("sample", next(prompts), tokens)
                assert sampled == count * tokens, "no stop token, no deadline"
                found.append(engine.seconds["sample"])
        prefill, whole = (statistics.median(found[1:]) for found in seconds.values())
        report.row(
            "throughput",
            graphs="yes" if graphs else "no",
            sequences=count,
            prompt=sizes.prompt,
            sampled=sizes.sampled,
            prefill_tokens_per_s=round(count * sizes.prompt / prefill, 1),
            tokens_per_s=round(count * sizes.sampled / whole, 1),
            ms_per_token=shapes.finite(1e3 * (whole - prefill) / (sizes.sampled - 1)),
        )


async def sleeping(report: Report, engine: Engine, cycles: int, before: int) -> None:
    """Rows of the table ``sleep``: the first two cycles, every tenth and the last. Figures are of all cycles."""
    report.doing(f"{cycles} cycles of sleep and wake")
    awake = shapes.memory_used()
    asleep, sleep_s, wake_s = [], [], []
    for cycle in range(1, cycles + 1):
        reason = await engine.call("sleep")
        if reason is not None:
            report.leave_out("memory freed by sleep", reason)
        asleep.append((shapes.memory_used() - before) / GIB)
        sleep_s.append(engine.seconds["sleep"])
        await engine.call("wake", "weights")
        woken = engine.seconds["wake"]
        await engine.call("wake", "kv_cache")
        wake_s.append(woken + engine.seconds["wake"])
        if cycle in (1, 2, cycles) or cycle % 10 == 0:
            report.row(
                "sleep",
                cycle=cycle,
                asleep_gib=round(asleep[-1], 3),
                sleep_s=round(sleep_s[-1], 3),
                wake_s=round(wake_s[-1], 3),
            )
    report.figures(
        cycles=cycles, sleep_s=round(statistics.median(sleep_s), 3), wake_s=round(statistics.median(wake_s), 3)
    )
    if "memory freed by sleep" not in report.result.left_out:
        report.figures(
            freed_gib=round((awake - before) / GIB - asleep[0], 3),
            left_gib=round(max(asleep), 3),
            growth_gib=round(asleep[-1] - asleep[1], 3),
        )


def _speedup(report: Report, batch: int) -> None:
    speeds = {row["graphs"]: row["tokens_per_s"] for row in report.rows("throughput") if row["sequences"] == batch}
    if len(speeds) == 2:
        report.figures(graph_speedup=round(speeds["yes"] / speeds["no"], 3))
