"""Traces of the hottest pieces of a training step, for chrome://tracing or Perfetto, and their longest kernels."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from battery import shapes
from battery.hardware import NO_ENGINE
from battery.parts import layer_stack, logprob_kernels
from battery.results import Report, Request
from megatron_fleet.algorithms.losses import sft_loss

TOKENS = {"full": 16384, "tiny": 256}
KERNELS = 12


FP8 = "fp8_blockwise"
"""The recipe that was the fastest where they were measured."""


def measure(report: Report, request: Request) -> None:
    """The layers in BF16 and in FP8, then the head."""
    layers(report, request, "layers", {})
    if problem := os.environ[NO_ENGINE]:
        report.leave_out("layers in FP8", problem)
    else:
        layers(report, request, "layers_fp8", {"recipe": FP8})
    head(report, request)


def layers(report: Report, request: Request, name: str, precision: Mapping[str, str]) -> None:
    """Forward and backward of the layers, with the launches of each."""
    report.doing(name)
    tokens = TOKENS[request.size]
    hf = shapes.model_config(request.size, layer_stack.LAYERS, shapes.SMALL_VOCABULARY)
    model = shapes.write_config(Path(request.scratch), hf)
    policy = shapes.make_policy(shapes.run_config(model, tokens, precision=precision))
    data = shapes.random_data(tokens, layer_stack.LONGEST[request.size], policy.vocab_size)
    found = traced(report, request, name, lambda: policy.forward_backward([data], sft_loss))
    report.figures(**{f"{name}_launches": round(found / hf["num_hidden_layers"], 1)})
    policy.close()


def head(report: Report, request: Request) -> None:
    """Forward and backward of log-probs over the whole vocabulary."""
    report.doing("head")
    sizes = logprob_kernels.SIZES[request.size]
    problem = logprob_kernels.Problem(sizes, torch.bfloat16)
    count = min(TOKENS[request.size], sizes.tokens)
    traced(report, request, "head", lambda: problem.run("ours", count, sizes.chunks[0]))


def traced(report: Report, request: Request, name: str, action: Callable[[], Any]) -> int:
    """Trace one call after two others; returns the number of kernels (on a CPU: of operators)."""
    for _ in range(2):
        action()
    shapes.wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if shapes.cuda() else [])]
    with profile(activities=activities) as profiler:
        seconds = shapes.timed(action)
    plain, packed = Path(request.scratch) / f"{name}.json", Path(request.keep) / f"trace-{name}.json.gz"
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)
    report.file(packed.name)
    wanted = DeviceType.CUDA if shapes.cuda() else DeviceType.CPU
    events = [event for event in profiler.key_averages() if event.device_type == wanted]
    spent = {event.key: _microseconds(event) for event in events}
    for event in sorted(events, key=lambda e: -spent[e.key])[:KERNELS]:
        kernel = event.key if len(event.key) <= 90 else f"{event.key[:87]}..."
        report.row("kernels", of=name, kernel=kernel, ms=shapes.finite(spent[event.key] / 1e3), calls=event.count)
    report.figures(**{f"{name}_busy": round(sum(spent.values()) / 1e6 / seconds, 4)})
    return sum(event.count for event in events)


def _microseconds(event: Any) -> float:
    return float(event.self_device_time_total if shapes.cuda() else event.self_cpu_time_total)
