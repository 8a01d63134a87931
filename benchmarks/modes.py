"""Modes of a rollout against engines that are always full: the quickstart with slow, heavy-tailed environments.

Tool calls wait log-normally (``LATENCY``). Every run does the same work: as many steps, of the same tasks, with equal
seeds and as many episodes at once. Prints one line of JSON: for each mode and seed the seconds of a step, and their
ratio to the bound: the trainer's own seconds, and those of all its episodes if every place were always taken. Runs go
one after the other; one that is there already (``--out``) is not repeated.

    python benchmarks/modes.py --out runs/modes [--modes wait continue] [--seeds 0 1 2] [--steps 20]
        [--picture docs/run/modes.svg]
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from measured import stamp

PROMPTS, SAMPLES = 8, 4
PLACES = PROMPTS * SAMPLES
"""Episodes at once."""
COMMON = (
    f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
    f"rollout.episodes_in_flight={PLACES}", "logging.trace_every=1", "env.step_timeout_s=120",
    "checkpoint.export.last=false", "eval.at_start=true", "eval.interval=0", "algorithm=importance_weighted",
)  # fmt: skip
LATENCY = ("env.faults.latency_median_s=0.5", "env.faults.latency_sigma=1.15")
COLOCATED = "rollout.engine.colocated=true"
MODES: Mapping[str, tuple[str, ...]] = {
    "wait": (COLOCATED,),
    "over-sampling": (
        COLOCATED, "rollout.batch.window=null", "rollout.batch.ahead=0.5", "rollout.unfinished=again",
    ),
    "continue": (COLOCATED, "rollout.max_staleness=2", "rollout.batch.window=null"),
    "ahead": ("rollout.max_staleness=2",),
}  # fmt: skip
WARM_UP = 1
"""First steps that are left out."""
DRAWN_STEPS = 3


def measure(out: Path, mode: str, seed: int, steps: int, more: Sequence[str]) -> dict[str, Any]:
    """One run, and what it was like."""
    folder = out / f"{mode}_seed{seed}"
    if not (folder / "summary.json").exists():
        overrides = [*COMMON, *LATENCY, *MODES[mode], f"run.seed={seed}", f"run.steps={steps}", *more]
        command = [sys.executable, "-m", "megatron_fleet.cli", "train", "experiment=quickstart"]
        subprocess.run([*command, "--out", str(folder), *overrides], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    done = [row for row in rows if "timing/step" in row]
    counted, last = done[WARM_UP:], done[-1]
    trainer = mean(counted, "timing/policy_train") + mean(counted, "timing/sync_weights")
    places = int(next(o.partition("=")[2] for o in (*COMMON, *more)[::-1] if o.startswith("rollout.episodes_in_fl")))
    episodes = mean(counted, "accounting/episodes")
    playing = episodes * mean(counted, "timing/episode_s/all") / places
    bound = max(trainer, playing) if COLOCATED not in MODES[mode] else trainer + playing
    seconds = (last["time"] - done[WARM_UP - 1]["time"]) / len(counted)
    return {
        "mode": mode,
        "seed": seed,
        "step_s": seconds,
        "bound_s": bound,
        "of_bound": seconds / bound,
        "trained_tokens_per_s": sum(row["accounting/trained_tokens"] for row in counted) / len(counted) / seconds,
        "pass_at_1_before": summary["pass_at_1_before"],
        "pass_at_1_after": summary["pass_at_1_after"],
        "staleness_mean": mean(counted, "async/staleness_mean"),
        "length_ratio": [row["async/length_ratio"] for row in done],
        "played_again": sum(row[f"accounting/attempts_{n}"] for row in done for n in ("stale", "unfinished")),
        "interrupted": sum(row["async/interrupted_episodes"] for row in done),
        "recomputed_tokens": sum(row["async/recomputed_tokens"] for row in done),
    }


def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(float(row[name]) for row in rows)


def draw(folders: Mapping[str, Path], path: Path) -> None:
    """Draw episodes and updates of the first steps of each run as SVG, from its traces."""
    found = {}
    for mode, folder in folders.items():
        events = [event for step in range(1, DRAWN_STEPS + 1) for event in slices(folder, step)]
        began = min(at for _, name, at, _ in events if name == "rollout")
        end = max(at + seconds for _, name, at, seconds in events if name == f"step {DRAWN_STEPS}")
        shown = [event for event in events if began <= event[2] < end]  # without the evaluation before
        found[mode] = [(kind, name, at - began, min(seconds, end - at)) for kind, name, at, seconds in shown]
    longest = max(at + seconds for events in found.values() for *_, at, seconds in events)
    width, height, left, top = 860, 110, 10, 24
    scale = (width - 2 * left) / longest
    out = []
    for row, (mode, events) in enumerate(found.items()):
        y = row * (height + top + 6) + top
        out.append(f'<text x="{left}" y="{y - 6}" class="t">{mode}</text>')
        end = max(at + seconds for *_, at, seconds in events)
        out.append(f'<rect class="b" x="{left}" y="{y}" width="{end * scale:.1f}" height="{height}"/>')
        for _, name, at, seconds in events:
            if name == "policy_train":
                place = f'x="{left + at * scale:.1f}" y="{y}" width="{seconds * scale:.1f}" height="{height}"'
                out.append(f'<rect class="u" {place}/>')
        episodes = sorted({(at, seconds) for kind, name, at, seconds in events if kind == "worker" and "-" in name})
        free: list[float] = []
        for at, seconds in episodes:
            lane = next((i for i, until in enumerate(free) if until <= at), len(free))
            free[lane : lane + 1] = [at + seconds]
            place = f'x="{left + at * scale:.1f}" y="{y + lane * height / PLACES:.1f}"'
            size = f'width="{seconds * scale:.1f}" height="{0.75 * height / PLACES:.2f}"'
            out.append(f'<rect class="e" {place} {size}/>')
    total = len(found) * (height + top + 6) + 26
    said = f"{longest:.0f} seconds from left to right; blue: an episode, orange: an update of the policy"
    out.append(f'<text x="{left}" y="{total - 8}" class="t">{said}</text>')
    style = ".t{font:13px sans-serif;fill:#777}.b{fill:#8881}.u{fill:#e8a33d;fill-opacity:.6}.e{fill:#4c8bd0}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}"><style>{style}</style>'
    path.write_text("\n".join([head, *out, "</svg>", ""]))


def slices(folder: Path, step: int) -> list[tuple[str, str, float, float]]:
    """Kind of component, name, unix time and seconds of each slice of a step's trace."""
    trace = json.loads(gzip.decompress((folder / "traces" / f"step-{step:06d}.json.gz").read_bytes()))
    events, start = trace["traceEvents"], trace["otherData"]["unix_time_of_0"]
    kinds = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    return [(kinds[e["pid"]], e["name"], start + e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--picture", type=Path, help="SVG of the first seed's first steps")
    parser.add_argument("overrides", nargs="*", help="further overrides, after --")
    given = parser.parse_args()
    runs = [measure(given.out, m, s, given.steps, given.overrides) for s in given.seeds for m in given.modes]
    if given.picture is not None:
        draw({mode: given.out / f"{mode}_seed{given.seeds[0]}" for mode in given.modes}, given.picture)
    print(json.dumps({**stamp(__file__), "latency": LATENCY, "runs": runs}))


if __name__ == "__main__":
    main()
