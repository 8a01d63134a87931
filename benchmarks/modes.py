"""Modes of a rollout: how fast each is against engines that are always full, and whether each learns as well.

``speed``: the quickstart with smaller batches and slow, heavy-tailed environments (``LATENCY``), without evaluations.
``of_bound`` is the ratio of a step's seconds to the bound: the trainer's own seconds, and those of the step's episodes
if every place were always taken (colocated: their sum, as they take turns; separate: the longer of both). Environments
wait through an update, too, so that colocated modes that leave episodes unfinished can be below the bound.
``learning``: the quickstart as it is, with held-out pass@1 before and after.

Every run of a part does the same work: as many steps of the same tasks, with equal seeds and as many episodes at once.
Prints one line of JSON. Runs go one after the other; one that is there already (``--out``) is not repeated.

    python benchmarks/modes.py --out runs/modes [--parts speed learning] [--modes wait continue] [--seeds 0 1 2]
        [--steps 12] [--picture docs/run/modes.svg]
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
COMMON = ("algorithm=importance_weighted", "checkpoint.export.last=false")
LATENCY = ("env.faults.latency_median_s=0.5", "env.faults.latency_sigma=1.15")
PARTS: Mapping[str, tuple[str, ...]] = {
    "speed": (
        f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}", "eval=none",
        f"rollout.episodes_in_flight={PLACES}", "logging.trace_every=1", "env.step_timeout_s=120", *LATENCY,
    ),
    "learning": (),
}  # fmt: skip
COLOCATED = "rollout.engine.colocated=true"
MODES: Mapping[str, tuple[str, ...]] = {
    "wait": (COLOCATED,),
    "over-sampling": (
        COLOCATED, "rollout.batch.window=null", "rollout.batch.ahead=0.5", "rollout.unfinished=again",
    ),
    "continue": (COLOCATED, "rollout.max_staleness=2", "rollout.batch.window=null"),
    "ahead": ("rollout.max_staleness=4", "rollout.batch.window=null"),
}  # fmt: skip
"""Steps of the last mode take about half the time of those on shared devices, so that the longest episodes see more."""
WARM_UP, DRAIN = 1, 2
"""First and last steps that are left out: engines fill, and run empty."""
DRAWN_STEPS = 3


def measure(folder: Path, part: str, mode: str, seed: int, steps: int | None, more: Sequence[str]) -> dict[str, Any]:
    """One run, and what it was like."""
    if not (folder / "summary.json").exists():
        overrides = [*COMMON, *PARTS[part], *MODES[mode], f"run.seed={seed}", *more]
        overrides += [] if steps is None else [f"run.steps={steps}"]
        command = [sys.executable, "-m", "megatron_fleet.cli", "train", "experiment=quickstart"]
        subprocess.run([*command, "--out", str(folder), *overrides], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    done = [row for row in rows if "timing/step" in row]
    counted = done[WARM_UP : len(done) - DRAIN]
    found = {
        "mode": mode,
        "seed": seed,
        "steps": len(done),
        "step_s": mean(counted, "timing/step"),
        "staleness_mean": mean(counted, "async/staleness_mean"),
        "staleness_max": max(row["async/staleness_max"] for row in done),
        "length_ratio": [row["async/length_ratio"] for row in done],
        "played_again": sum(row[f"accounting/attempts_{n}"] for row in done for n in ("stale", "unfinished")),
        "interrupted": sum(row["async/interrupted_episodes"] for row in done),
        "recomputed_tokens": sum(row["async/recomputed_tokens"] for row in done),
    }
    if part == "learning":
        return found | {f"pass_at_1_{when}": summary[f"pass_at_1_{when}"] for when in ("before", "after")}
    trainer = mean(counted, "timing/policy_train") + mean(counted, "timing/sync_weights")
    places = int(
        next(o.partition("=")[2] for o in (*PARTS[part], *more)[::-1] if o.startswith("rollout.episodes_in_f"))
    )
    playing = mean(counted, "accounting/episodes") * mean(counted, "timing/episode_s/all") / places
    bound = trainer + playing if COLOCATED in MODES[mode] else max(trainer, playing)
    tokens = mean(counted, "accounting/trained_tokens")
    return found | {
        "trainer_s": trainer,
        "bound_s": bound,
        "of_bound": found["step_s"] / bound,
        "trained_tokens_per_s": tokens / found["step_s"],
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of every run (default: 12 for speed, the quickstart's for learning)")
    parser.add_argument("--picture", type=Path, help="SVG of the first steps of the first seed's speed runs")
    parser.add_argument("overrides", nargs="*", help="further overrides, after --")
    given = parser.parse_args()

    def folder(part: str, mode: str, seed: int) -> Path:
        return given.out / f"{part}_{mode}_seed{seed}"

    report: dict[str, Any] = {part: [] for part in given.parts}
    for part in given.parts:
        steps = given.steps or (12 if part == "speed" else None)
        for seed in given.seeds:
            for mode in given.modes:
                report[part].append(measure(folder(part, mode, seed), part, mode, seed, steps, given.overrides))
    if given.picture is not None:
        draw({mode: folder("speed", mode, given.seeds[0]) for mode in given.modes}, given.picture)
    print(json.dumps({**stamp(__file__), "latency": LATENCY, **report}))


if __name__ == "__main__":
    main()
