"""Engines for long episodes alone: would a step whose longest episode is waited for be shorter with them?

Computed with the plan's engines (`planning.rollout`), for a published configuration. Episodes play on the engine with
the fewest of them; each engine advances its episodes together, the fewer the faster. With ``long`` engines of their
own, an episode moves there once it has sampled as many tokens as a quantile of all episodes. Prints one line of JSON:
`seconds` of the rollout, and `ratios` to the seconds without such engines, by number of engines and quantile; `best`
is the smallest of these ratios.

    python benchmarks/long_engines.py [--experiments qwen3_8b_fleet qwen3_5_35b_a3b_fleet] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from measured import stamp

from megatron_fleet.config.load import load
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.planning.hardware import gpu_of
from megatron_fleet.planning.rollout import Engine
from megatron_fleet.planning.shapes import shape_of
from megatron_fleet.planning.workload import Workload

QUANTILES = (0.5, 0.8, 0.9, 0.95)


@dataclass(slots=True)
class Episode:
    """Tokens that an episode has still to sample, and has sampled."""

    left: float
    done: float = 0.0


def rollout_s(engine: Engine, lengths: np.ndarray, engines: int, long: int, moves_at: float, seed: int) -> float:
    """Return the seconds until all episodes have ended.

    Args:
        lengths: sampled tokens of each episode, ``[N]``.
        engines: their number, those for long episodes included.
        long: engines for long episodes; 0: none.
        moves_at: sampled tokens from which an episode is long.
    """
    waiting = [Episode(tokens) for tokens in np.random.default_rng(seed).permutation(lengths)]
    playing: list[list[Episode]] = [[] for _ in range(engines)]
    moving: list[Episode] = []
    first = range(engines - long)
    now = 0.0
    while True:
        for queue, pool in ((waiting, first), (moving, range(engines - long, engines))):
            while queue and pool and len(playing[freest := min(pool, key=lambda e: len(playing[e]))]) < engine.slots:
                playing[freest].append(queue.pop())
        token_s = {e: engine.token_s(len(episodes)) for e, episodes in enumerate(playing) if episodes}
        if not token_s:
            return now
        passed = math.inf
        for e, seconds in token_s.items():
            moves = long > 0 and e in first
            tokens = min(min(one.left, moves_at - one.done) if moves else one.left for one in playing[e])
            passed = min(passed, tokens * seconds)
        now += passed
        for e in token_s:
            for one in playing[e]:
                one.left -= passed / token_s[e]
                one.done += passed / token_s[e]
            over = [one for one in playing[e] if one.left > 1e-6]
            moved = [one for one in over if long and e in first and one.done >= moves_at - 1e-6]
            moving += moved
            playing[e] = [one for one in over if one not in moved]


def measure(experiment: str, seeds: int) -> dict[str, object]:
    config = load([f"experiment={experiment}"])
    hf_config, _ = shape_of(config.model.path)
    workload = Workload.of(config.rollout, config.env)
    engine = Engine.of(config, hf_config, read_model(hf_config), gpu_of(config.cluster, None, None), workload)
    lengths, engines = workload.lengths(workload.episodes) * workload.sampled, config.rollout.engine.count

    def mean_s(long: int, quantile: float) -> float:
        moves_at = float(np.quantile(lengths, quantile))
        return fmean(rollout_s(engine, lengths, engines, long, moves_at, seed) for seed in range(seeds))

    alone = mean_s(0, 1.0)
    of = {
        f"{long} of {engines}, {q}": mean_s(long, q) / alone for long in range(1, engines // 2 + 1) for q in QUANTILES
    }
    return {"seconds": alone, "ratios": of, "best": min(of.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    users = ["qwen3_8b_fleet", "qwen3_5_35b_a3b_fleet"]
    parser.add_argument("--experiments", nargs="+", default=users, help="configurations (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="orders of the episodes (%(default)s)")
    args = parser.parse_args()
    results = {experiment: measure(experiment, args.seeds) for experiment in args.experiments}
    print(json.dumps({"benchmark": "long_engines", "results": results, **stamp(__file__)}))


if __name__ == "__main__":
    main()
