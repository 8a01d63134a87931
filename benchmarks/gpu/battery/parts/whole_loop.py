"""A whole run, ``mfleet train``, with everything on the GPU."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from battery.results import ROOT, Report, Request
from megatron_fleet.telemetry.sinks import read_metrics

MFLEET = [sys.executable, "-m", "megatron_fleet.cli"]
EXPERIMENT = {"full": "gpu_smoke", "tiny": "quickstart"}
OVERRIDES = {
    "full": (),
    "tiny": ("run.steps=2", "eval=none", "rollout.prompts_per_step=1", "rollout.samples_per_prompt=2"),
}
COLUMNS = {
    "step_s": "timing/step",
    "generate_s": "timing/generate",
    "train_s": "timing/policy_train",
    "sync_s": "timing/sync_weights",
    "reward": "reward/avg_raw_reward",
    "tokens_per_s": "generate/tokens_per_second",
}
MISMATCH = "policy/mismatch_kl"


def measure(report: Report, request: Request) -> None:
    """Run the experiment and read its metrics, also while it runs."""
    out, model = Path(request.scratch) / "run", Path(request.scratch) / "model"
    overrides = [f"experiment={EXPERIMENT[request.size]}", f"run.out={out}", *OVERRIDES[request.size]]
    if request.size == "full":
        report.doing("mfleet model make-random")
        subprocess.run([*MFLEET, "model", "make-random", str(model)], cwd=ROOT, env=dict(os.environ), check=True)
        overrides.append(f"model.path={model}")
    report.doing(f"mfleet train {overrides[0]}")
    report.figures(experiment=EXPERIMENT[request.size])
    began = time.monotonic()
    process = subprocess.Popen([*MFLEET, "train", *overrides], cwd=ROOT, env=dict(os.environ))
    while process.poll() is None:
        time.sleep(1)
        add_rows(report, read_metrics(out / "metrics.jsonl")[:-1])  # the last one may still be written
    add_rows(report, read_metrics(out / "metrics.jsonl"))
    if process.returncode:
        raise RuntimeError(f"mfleet train ended with status {process.returncode}; its output is in the log")
    report.figures(whole_s=round(time.monotonic() - began, 1))
    summarise(report, read_metrics(out / "metrics.jsonl"))


def add_rows(report: Report, metrics: list[dict[str, Any]]) -> None:
    """Rows of the table ``steps`` for steps that it does not have yet."""
    known = {row["step"] for row in report.rows("steps")}
    for row in metrics:
        if row["step"] not in known and COLUMNS["step_s"] in row:
            report.row("steps", step=row["step"], **{key: row.get(name) for key, name in COLUMNS.items()})


def summarise(report: Report, metrics: list[dict[str, Any]]) -> None:
    """Figures from the rows."""
    rows = report.rows("steps")
    if not rows:
        raise RuntimeError("the run has finished and logged no step")
    later = rows[1:] or rows
    report.figures(steps=len(rows), step_s=round(statistics.median(row["step_s"] for row in later), 3))
    speeds = [row["tokens_per_s"] for row in later if row["tokens_per_s"]]
    if speeds:
        report.figures(tokens_per_s=round(statistics.median(speeds), 1))
    if found := [row[MISMATCH] for row in metrics if row.get(MISMATCH) is not None]:
        report.figures(mismatch=found[-1])
