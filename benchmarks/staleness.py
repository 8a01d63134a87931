"""Running ahead against on-policy: the quickstart with environment latency, at several bounds of staleness.

Tool calls wait log-normally (median and sigma below). Every run does the same work: as many steps, with the same tasks.
Prints one line of JSON: for each bound and seed wall seconds, their ratio to staleness 0 of the same seed, held-out
pass@1 before and after, the mean and largest staleness, and how long trainer and engines waited for each other, as
shares of the steps' time. Runs go one after the other; a run that is there already (``--out``) is not repeated.

    python benchmarks/staleness.py --out runs/staleness [--bounds 0 1 4] [--seeds 0 1 2] [--steps 20]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from measured import stamp

STALE = ("algorithm=importance_weighted",)
"""With bounds above 0: samples of earlier weights are weighed by their ratio to these."""
LATENCY = ("env.faults.latency_median_s=0.5", "env.faults.latency_sigma=1.0", "env.step_timeout_s=120")


def measure(out: Path, bound: int, seed: int, steps: int, more: list[str]) -> dict[str, Any]:
    """One run, and what it was like."""
    folder = out / f"staleness{bound}_seed{seed}"
    if not (folder / "summary.json").exists():
        overrides = [f"rollout.max_staleness={bound}", f"run.seed={seed}", f"run.steps={steps}", *LATENCY]
        overrides += [*(STALE if bound else ()), *more]
        command = [sys.executable, "-m", "megatron_fleet.cli", "train", "experiment=quickstart"]
        subprocess.run([*command, "--out", str(folder), *overrides], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps_done = [row for row in rows if "timing/step" in row]
    total = sum(row["timing/step"] for row in steps_done)
    first, last = steps_done[0], steps_done[-1]
    return {
        "max_staleness": bound,
        "seed": seed,
        "training_s": last["time"] - first["time"] + first["timing/step"],
        "pass_at_1_before": summary["pass_at_1_before"],
        "pass_at_1_after": summary["pass_at_1_after"],
        "staleness_mean": sum(row["async/staleness_mean"] for row in steps_done) / len(steps_done),
        "staleness_max": max(row["async/staleness_max"] for row in steps_done),
        "trainer_waits_share": sum(row["timing/rollout_wait"] for row in steps_done) / total,
        "engines_idle_share": sum(row["timing/engines_idle"] for row in steps_done) / total,
        "stale_episodes": sum(row["accounting/attempts_stale"] for row in steps_done),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("overrides", nargs="*", help="further overrides, after --")
    given = parser.parse_args()
    runs = [measure(given.out, b, s, given.steps, given.overrides) for s in given.seeds for b in given.bounds]
    reference = {run["seed"]: run["training_s"] for run in runs if run["max_staleness"] == 0}
    for run in runs:
        if run["seed"] in reference:
            run["time_ratio"] = run["training_s"] / reference[run["seed"]]
    print(json.dumps({**stamp(__file__), "latency": LATENCY, "runs": runs}))


if __name__ == "__main__":
    main()
