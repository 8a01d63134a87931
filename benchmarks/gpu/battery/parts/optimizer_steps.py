"""One optimizer step of the trainer against the bytes that it reads and writes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from battery import shapes, variants
from battery.hardware import GIB
from battery.results import Report, Request, Sink
from megatron_fleet.algorithms.losses import sft_loss

LAYERS = 4
TOKENS = {"full": 4096, "tiny": 128}
REPEATS = {"full": 5, "tiny": 1}
PARAMETERS_8B = 8.19e9
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "moments in float32": {},
    "moments in bfloat16": {"moments": "bfloat16"},
    "in host memory": {"offload_fraction": 1.0},
}
BYTES = {"moments in float32": 30, "moments in bfloat16": 22, "in host memory": 30}
"""Read and written per parameter: gradient 4, master weight 4 + 4, moments 2 × (4 + 4) or 2 × (2 + 2), weight 2."""


def measure(report: Report, request: Request) -> None:
    """Each variant in a process of its own."""
    for name, optimizer in VARIANTS.items():
        settings = {"size": request.size, "scratch": request.scratch, "name": name, "optimizer": dict(optimizer)}
        variants.run(report, __name__, name, settings)


def variant(sink: Sink, settings: Mapping[str, Any]) -> None:
    """A row of the table ``steps``; with float32 moments also the share of a copy's speed."""
    with tempfile.TemporaryDirectory(dir=settings["scratch"]) as folder:
        _variant(sink, settings, Path(folder))


def _variant(sink: Sink, settings: Mapping[str, Any], folder: Path) -> None:
    size, name = settings["size"], settings["name"]
    hf = shapes.model_config(size, LAYERS, shapes.SMALL_VOCABULARY)
    policy_section = {"optimizer": settings["optimizer"]}
    config = shapes.run_config(shapes.write_config(folder, hf), TOKENS[size], policy=policy_section)
    policy = shapes.make_policy(config)
    count = sum(p.numel() for chunk in policy.model_chunks for p in chunk.parameters())
    policy.forward_backward([shapes.random_data(TOKENS[size], TOKENS[size], policy.vocab_size)], sft_loss)
    # Later steps reduce and add zero gradients: the same memory is touched.
    peak = shapes.peak_bytes(lambda: policy.optim_step(1e-6))
    seconds = shapes.median_seconds(lambda: policy.optim_step(1e-6), REPEATS[size])
    policy.close()
    nbytes = BYTES[name] * count
    sink.row(
        "steps",
        variant=name,
        ms=shapes.finite(1e3 * seconds),
        gb=shapes.finite(nbytes / 1e9),
        gb_s=shapes.finite(nbytes / seconds / 1e9),
        ms_8b=shapes.finite(1e3 * seconds * PARAMETERS_8B / count),
        extra_gib=None if peak is None else round(peak / GIB, 2),
    )
    if not settings["optimizer"]:
        sink.figures(parameters=count, step_share=round(nbytes / seconds / 1e12 / shapes.copy_tb_s(size), 4))
