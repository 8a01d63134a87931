"""The layers over several ranks of this machine, one per GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from battery import shapes, variants
from battery.parts.layer_stack import LAYERS, LONGEST, REPEATS, step_row
from battery.results import Report, Request, Sink

TOKENS = {"full": 32768, "tiny": 256}


def measure(report: Report, request: Request) -> None:
    """One rank, then all of them with tensor parallelism, then with data parallelism."""
    count = request.gpus if request.device == "cuda" else 2
    for tensor, data in ((1, 1), (count, 1), (1, count)):
        ranks = tensor * data
        name = f"tensor {tensor}, data {data}"
        settings = {"size": request.size, "scratch": request.scratch, "tensor": tensor, "data": data}
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        variants.run(report, __name__, name, settings, launch)
    summarise(report, count)


def variant(sink: Sink, settings: Mapping[str, Any]) -> None:
    """A row of the table ``speed``, from every rank; the first one's is kept."""
    size, tensor, data = settings["size"], settings["tensor"], settings["data"]
    hf = shapes.model_config(size, LAYERS, shapes.SMALL_VOCABULARY)
    with tempfile.TemporaryDirectory(dir=settings["scratch"]) as folder:
        model = shapes.write_config(Path(folder), hf)
        config = shapes.run_config(model, TOKENS[size], parallel={"tensor": tensor, "data": data})
        policy = shapes.make_policy(config)
    row = step_row(policy, TOKENS[size], LONGEST[size], REPEATS[size])
    policy.close()
    sink.row(
        "speed",
        tensor=tensor,
        data=data,
        tokens=row["tokens"],
        ms=row["ms"],
        tokens_per_s=row["tokens_per_s"] * data,
        tflops=shapes.finite(row["tflops"] / tensor),
        extra_gib=row["extra_gib"],
    )


def summarise(report: Report, count: int) -> None:
    """Efficiency of tensor parallelism."""
    speeds = {(row["tensor"], row["data"]): row["tokens_per_s"] for row in report.rows("speed")}
    if (1, 1) in speeds and (count, 1) in speeds:
        report.figures(tensor_efficiency=round(speeds[count, 1] / count / speeds[1, 1], 3))
