"""Compare the simulator of ``mfleet plan --simulate`` with real runs on this machine.

One run that plays on-policy tells how fast engines, tools and trainer are; the simulator then predicts the mean step of
other runs of the same traffic with other bounds on staleness, and of the first one itself. Goal: within 10 %.

    python benchmarks/simulator.py runs/bound0 runs/bound1 runs/bound4

Each is the folder of a finished run, with ``metrics.jsonl`` and ``config.json``. Trainer and engines of one machine
share its processors and are slower while both work: by how much, the trainer's own seconds tell, of the run that plays
ahead farthest against the on-policy one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.load import load_resolved
from megatron_fleet.planning.simulation import Setup, Simulation
from megatron_fleet.planning.workload import Workload
from megatron_fleet.telemetry.sinks import read_metrics

WARM_UP = 2
"""First steps that are left out: engines compile and pages load."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A real run: mean seconds of a step, its rollout, the trainer's own work, its weight sync and an episode; mean
    tokens that an episode sampled.
    """

    staleness: int
    episodes: int
    engines: int
    slots: int
    steps: int
    step_s: float
    rollout_s: float
    trainer_s: float
    sync_s: float
    tokens: float
    episode_s: float


def measure(folder: Path) -> Measured:
    """Read a run."""
    config = load_resolved(folder / "config.json")
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "timing/step" in row][WARM_UP:]
    if not rows:
        raise UserError(f"{folder} has no more than {WARM_UP} steps; give a longer run.")
    rollout, engine = config.rollout, config.rollout.engine
    return Measured(
        staleness=rollout.max_staleness,
        episodes=rollout.prompts_per_step * rollout.samples_per_prompt,
        engines=engine.replicas,
        slots=min(engine.sequences(rollout.episodes_in_flight), -(-rollout.most_in_flight() // engine.replicas)),
        steps=len(rows),
        step_s=_mean(rows, "timing/step"),
        rollout_s=_mean(rows, "timing/generate"),
        trainer_s=_mean(rows, "timing/policy_train"),
        sync_s=_mean(rows, "timing/sync_weights"),
        tokens=_mean(rows, "generate/avg_num_tokens"),
        episode_s=_mean(rows, "timing/episode_s/all"),
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return fmean(float(row[name]) for row in rows if row.get(name) is not None)


def setup(one: Measured, sigma: float, contention: float) -> Setup:
    """The simulated machine that plays the on-policy run in its time.

    The pace of its episodes is the one at which its rollout takes as long as it took. It does not depend on their
    number: engines on a CPU take about as long for a step however few sequences it has.
    """
    load = Workload(episodes=one.episodes, mean=one.tokens, longest=int(50 * one.tokens), sampled=1.0, sigma=sigma)
    lengths = load.lengths(500)
    base = Setup(
        engines=one.engines, slots=one.slots, token_s=lambda _: one.episode_s / one.tokens, lengths=lengths,
        waiting_s=0.0, episodes=one.episodes, trainer_s=0.0, sync_s=0.0, failures=0.0, contention=contention,
    )  # fmt: skip
    alone = np.mean([Simulation(base, seed).play(one.steps).step_s for seed in range(3)])
    pace = one.episode_s / one.tokens * one.rollout_s / float(alone)
    trainer = max(0.0, one.step_s - one.rollout_s - one.sync_s)
    return replace(base, token_s=lambda _: pace, trainer_s=trainer, sync_s=one.sync_s)


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs; the first one is on-policy")
    parser.add_argument("--sigma", type=float, default=0.5, help="spread of the logarithm of episodes' lengths")
    args = parser.parse_args()
    first, *others = map(measure, args.runs)
    if first.staleness:
        raise UserError(f"{args.runs[0]} has rollout.max_staleness={first.staleness}; give an on-policy run first.")
    ahead = max((first, *others), key=lambda run: run.staleness)
    machine = setup(first, args.sigma, max(1.0, ahead.trainer_s / first.trainer_s))
    say(f"trainer and engines are {machine.contention:.2f} times slower while both work")
    say("run | staleness | measured, s a step | simulated | error")
    for folder, run in zip(args.runs, (first, *others), strict=True):
        tried = replace(machine, staleness=run.staleness)
        found = float(np.mean([Simulation(tried, seed).play(run.steps).step_s for seed in range(3)]))
        say(f"{folder} | {run.staleness} | {run.step_s:.1f} | {found:.1f} | {100 * (found / run.step_s - 1):+.0f} %")


if __name__ == "__main__":
    main()
