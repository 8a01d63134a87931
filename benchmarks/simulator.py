"""Compare the simulator of ``mfleet plan --simulate`` with real runs on this machine.

The durations of episodes, trainer and weight sync are those of the runs that wait for every episode. The simulator
predicts the mean step of runs of the same traffic in other modes, and of these runs themselves. Goal: within 10 %.

    python benchmarks/modes.py --parts speed --out runs/modes
    python benchmarks/simulator.py runs/modes/speed_*

Each is the folder of a finished run, with ``metrics.jsonl``, ``config.json`` and ``trajectories``; means are over the
runs of a mode. Trainer and engines of one machine share processors and are slower while both work. The ratio is that
of the trainer's own seconds, in the runs with engines that are not colocated, to those in the runs that wait.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.load import load_resolved
from megatron_fleet.planning.simulation import Setup, Simulation
from megatron_fleet.telemetry.sinks import read_metrics
from megatron_fleet.telemetry.trajectories import load_trajectories

WARM_UP, DRAIN = 1, 2
"""First and last steps that are left out: engines fill, and run empty."""
SEEDS = 5
WAITING = {"staleness": 0, "ahead": None, "window": 1, "unfinished": "continue"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A real run: its mode as fields of `Setup`, mean seconds of a step, its rollout, the trainer's work and its weight
    sync.

    Attributes:
        name: of the mode: those of its keys that are not as in a run that waits for every episode.
        waits: it does.
        shares: engines and trainer work at the same time, on the same processors.
        episodes_s: seconds of the episodes of each group, ``[N, samples]``.
        tools_s: mean seconds of an episode outside of the engine.
        tool_left_s: see `Setup`.
    """

    name: str
    mode: Mapping[str, Any]
    waits: bool
    shares: bool
    steps: int
    step_s: float
    rollout_s: float
    trainer_s: float
    sync_s: float
    episodes_s: np.ndarray
    tools_s: float
    tool_left_s: float


def measure(folder: Path) -> Measured:
    """Read a run."""
    config = load_resolved(folder / "config.json")
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "timing/step" in row]
    rows = rows[WARM_UP : len(rows) - DRAIN]
    if not rows:
        raise UserError(f"{folder} has no more than {WARM_UP + DRAIN} steps; give a longer run.")
    rollout, engine = config.rollout, config.rollout.engine
    files = [folder / "trajectories" / f"step_{row['step']:06d}.parquet" for row in rows]
    episodes = [t for file in files for t in load_trajectories(file)]
    seconds = np.array([t.metrics["seconds"] for t in episodes])
    # tools' times are log-normal
    mean_tool_s = sum(t.metrics["env_s"] for t in episodes) / max(1, sum(t.metrics["tool_calls"] for t in episodes))
    sigma = config.env.faults.latency_sigma
    mode = {
        "engines": engine.replicas,
        "slots": min(engine.sequences(rollout.episodes_in_flight), -(-rollout.most_in_flight() // engine.replicas)),
        "episodes": rollout.prompts_per_step * rollout.samples_per_prompt,
        "samples": rollout.samples_per_prompt,
        "staleness": rollout.max_staleness,
        "ahead": rollout.batch.ahead,
        "window": rollout.batch.window,
        "unfinished": rollout.unfinished,
        "colocated": bool(engine.colocated),
    }
    different = {key: mode[key] for key, value in WAITING.items() if mode[key] != value}
    shares = not engine.colocated and rollout.max_staleness > 0
    words = [f"{key}={value}" for key, value in different.items()] + ["apart"] * shares
    return Measured(
        name=" ".join(words) or "waiting for every episode",
        mode=mode,
        waits=not different,
        shares=shares,
        steps=len(rows),
        step_s=_mean(rows, "timing/step"),
        rollout_s=_mean(rows, "timing/generate"),
        trainer_s=_mean(rows, "timing/policy_train"),
        sync_s=_mean(rows, "timing/sync_weights"),
        episodes_s=seconds.reshape(-1, rollout.samples_per_prompt),
        tools_s=float(np.mean(seconds)) - fmean(t.metrics["generate_s"] for t in episodes),
        tool_left_s=mean_tool_s * math.exp(sigma**2) / 2,
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(float(row[name]) for row in rows if row.get(name) is not None)


def simulated(setup: Setup, steps: int) -> float:
    """Mean seconds of a step after the first ones."""
    plays = [
        [Simulation(setup, seed).play(count).seconds for count in (WARM_UP, WARM_UP + steps)] for seed in range(SEEDS)
    ]
    return fmean(end - begin for begin, end in plays) / steps


def machine(one: Measured, contention: float) -> Setup:
    """The simulated machine on which the waiting run was played.

    A "token" is a second of an episode, and passes in a second whatever the number of episodes: engines on a CPU take
    about as long for a step however few sequences it has.
    """
    return Setup(
        token_s=lambda _: 1.0,
        lengths=one.episodes_s, waiting_s=one.tools_s, waiting_sigma=0.0, failures=0.0, sync_s=one.sync_s,
        trainer_s=max(0.0, one.step_s - one.rollout_s - one.sync_s),
        tool_left_s=one.tool_left_s, contention=contention, **one.mode,
    )  # fmt: skip


def merged(runs: Sequence[Measured]) -> Measured:
    """Return the means over runs of one mode, and all their episodes."""
    names = ("step_s", "rollout_s", "trainer_s", "sync_s", "tools_s", "tool_left_s")
    means = {name: fmean(getattr(run, name) for run in runs) for name in names}
    return replace(runs[0], episodes_s=np.concatenate([run.episodes_s for run in runs]), **means)


def main() -> None:
    """Print a line for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, some of which wait for every episode")
    args = parser.parse_args()
    by_mode: defaultdict[str, list[Measured]] = defaultdict(list)
    for folder in args.runs:
        by_mode[(one := measure(folder)).name].append(one)
    runs = {name: merged(found) for name, found in by_mode.items()}
    waiting = next((run for run in runs.values() if run.waits), None)
    if waiting is None:
        raise UserError("No run has rollout.max_staleness=0 and rollout.batch.ahead=null; give one that has.")
    shared = [run.trainer_s / waiting.trainer_s for run in runs.values() if run.shares]
    base = machine(waiting, max(1.0, fmean(shared)) if shared else 1.0)
    say(f"trainer and engines are {base.contention:.2f} times slower while both work")
    say("mode | runs | measured, s a step | simulated | error")
    for name, run in runs.items():
        found, count = simulated(replace(base, **run.mode), run.steps), len(by_mode[name])
        say(f"{name} | {count} | {run.step_s:.1f} | {found:.1f} | {100 * (found / run.step_s - 1):+.0f} %")


if __name__ == "__main__":
    main()
