"""The packing plan on lengths like Fleet's: log-normal, cut to 2K-57K tokens. Prints one line of JSON.

``fill`` is tokens ÷ tokens processed, ``imbalance`` the costliest rank's FLOPs ÷ the mean - 1: each the worst of a grid
of sequences × data ranks × seeds. Few sequences cannot be shared out evenly (the costliest one is on some rank), so two
figures more: ``imbalance_over_bound`` has a lower bound of every plan's costliest rank in place of the mean,
``imbalance_over_optimum`` the best plan that exists, where a search found it. ``waiting`` is what is lost when ranks
wait for each other after every micro-batch, as expert parallelism makes them. ``plan_ms`` is processor time (one
thread), so that a busy machine does not disturb it.

``longest_first`` is the usual greedy plan, in micro-batches of one fixed width: longest first, to the rank with the
least of tokens × (1 + tokens / 4096), into its first micro-batch with room.

    python benchmarks/packing.py [--seeds 20] [--capacity 65536] [--timed 4096]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from measured import stamp

from megatron_fleet.models.flops import SequenceCost
from megatron_fleet.models.hf_config import read_model
from megatron_fleet.trainer.packing.pack import micro_batch_width
from megatron_fleet.trainer.packing.pack_plan import Plan, plan_micro_batches

SEQUENCES = (16, 32, 64, 128, 256, 512)
RANKS = (1, 2, 4, 8, 16, 32)
MICRO_BATCH_ALIGNS = (128, 256, 512, 1024, 2048, 4096)
SEQUENCE_ALIGN = 4
GOAL = 0.03
"""Imbalance that a plan may have."""
SHORTEST, LONGEST, MEDIAN, SIGMA = 2_000, 57_000, 10_000, 0.9
TRAINED = 8
"""One token in so many is the agent's own."""
EXACT_SEQUENCES = 32
"""Up to so many sequences the best plan is searched for."""
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1e6,
}


def fleet_lengths(count: int, seed: int) -> list[int]:
    """Tokens of sequences; what falls outside the cut is drawn again."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while len(lengths) < count:
        drawn = int(rng.lognormal(np.log(MEDIAN), SIGMA))
        if SHORTEST <= drawn <= LONGEST:
            lengths.append(drawn)
    return lengths


def least_maximum(costs: Sequence[float], dp: int) -> float:
    """A lower bound of the costliest rank: the mean, the costliest item, and for each n with more than n · dp items
    the cheapest n + 1 of the n · dp + 1 costliest, because some rank has n + 1 of these."""
    costly = sorted(costs, reverse=True)
    pigeons = [sum(costly[n * dp - n : n * dp + 1]) for n in range(1, (len(costly) - 1) // dp + 1)]
    return max(sum(costly) / dp, costly[0], *pigeons)


def optimum(costs: Sequence[float], dp: int, known: float, nodes: int) -> float | None:
    """The costliest rank of the best partition, by depth-first search below a ``known`` one's through at most ``nodes``
    partial ones; ``None``: it did not finish."""
    costly, loads, best, left = sorted(costs, reverse=True), [0.0] * dp, known, nodes
    enough = least_maximum(costs, dp) * (1 + 1e-12)

    def place(index: int) -> None:
        nonlocal best, left
        left -= 1
        if index == len(costly):
            best = max(loads)
            return
        for load in sorted(set(loads)):
            if best <= enough or left < 0 or load + costly[index] >= best * (1 - 1e-12):
                return
            rank = loads.index(load)
            loads[rank] += costly[index]
            place(index + 1)
            loads[rank] = load

    place(0)
    return None if left < 0 and best > enough else best


def longest_first(lengths: Sequence[int], dp: int, capacity: int) -> Plan:
    loads = [0.0] * dp
    plan: Plan = [[] for _ in range(dp)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        loads[rank] += lengths[index] * (1 + lengths[index] / 4096)
        micro_batch = next((r for r in plan[rank] if sum(lengths[i] for i in r) + lengths[index] <= capacity), None)
        if micro_batch is None:
            plan[rank].append(micro_batch := [])
        micro_batch.append(index)
    most = max(map(len, plan))
    return [micro_batches + [[] for _ in range(most - len(micro_batches))] for micro_batches in plan]


def micro_batch_costs(plan: Plan, costs: Sequence[float]) -> np.ndarray:
    """``[ranks, micro-batches]``"""
    return np.array([[sum(costs[i] for i in micro_batch) for micro_batch in micro_batches] for micro_batches in plan])


def fill(plan: Plan, lengths: Sequence[int], width: Callable[[list[int]], int]) -> float:
    return sum(lengths) / sum(
        width([lengths[i] for i in micro_batch]) for micro_batches in plan for micro_batch in micro_batches
    )


def measure(count: int, dp: int, seed: int, capacity: int, nodes: int, cost: SequenceCost) -> dict[str, Any]:
    """Figures of one plan."""
    lengths = fleet_lengths(count, seed)
    costs = cost(lengths, [n // TRAINED for n in lengths]).tolist()
    plan, wide = (plan_micro_batches(lengths, dp, tokens, costs, SEQUENCE_ALIGN) for tokens in (capacity, 2 * capacity))
    greedy = longest_first(lengths, dp, capacity)
    mean, bound = sum(costs) / dp, least_maximum(costs, dp)
    loads, wide_loads = micro_batch_costs(plan, costs), micro_batch_costs(wide, costs)
    costliest, greedy_costliest = (float(micro_batch_costs(p, costs).sum(1).max()) for p in (plan, greedy))
    best = optimum(costs, dp, costliest, nodes) if count <= EXACT_SEQUENCES else None
    figures = {
        "imbalance": costliest / mean - 1,
        "least_imbalance": (best or bound) / mean - 1,
        "imbalance_over_bound": costliest / bound - 1,
        "imbalance_over_optimum": None if best is None else costliest / best - 1,
        "waiting": loads.max(0).sum() / costliest - 1,
        "waiting_in_micro_batches_twice_as_wide": wide_loads.max(0).sum() / wide_loads.sum(1).max() - 1,
        "longest_first_imbalance": greedy_costliest / mean - 1,
        "longest_first_over_ours": greedy_costliest / costliest,
        "longest_first_fill": fill(greedy, lengths, lambda _: capacity),
    }
    for align in MICRO_BATCH_ALIGNS:
        figures[f"fill_{align}"] = fill(
            plan, lengths, partial(micro_batch_width, sequence_align=SEQUENCE_ALIGN, micro_batch_align=align)
        )
    return figures


def worst(figures: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [f[name] for f in figures if f[name] is not None]
    if not values:
        return None
    return round(float(min(values) if "fill" in name else max(values)), 4)


def milliseconds(count: int, dp: int, capacity: int, cost: SequenceCost, repeats: int = 9) -> list[float]:
    """Median and fastest time of a plan and the costs it needs."""
    lengths = fleet_lengths(count, 0)
    trained, seconds = [n // TRAINED for n in lengths], []
    for _ in range(repeats):
        start = time.thread_time()
        plan_micro_batches(lengths, dp, capacity, cost(lengths, trained), SEQUENCE_ALIGN, MICRO_BATCH_ALIGNS[0])
        seconds.append(time.thread_time() - start)
    return [round(1e3 * statistics.median(seconds), 1), round(1e3 * min(seconds), 1)]


def summary(cells: dict[tuple[int, int], list[dict[str, Any]]]) -> dict[str, Any]:
    """The worst of the grid, and how often the goal of balance was met where that is possible."""
    plans = [figures for cell in cells.values() for figures in cell]
    several = [figures for (count, dp), cell in cells.items() if count >= 4 * dp for figures in cell]
    possible = [f for f in plans if f["least_imbalance"] <= GOAL]
    return {
        "fill": worst(plans, f"fill_{MICRO_BATCH_ALIGNS[0]}"),
        "imbalance": worst(plans, "imbalance"),
        "imbalance_where_possible": worst(possible, "imbalance"),
        "imbalance_over_bound": worst(plans, "imbalance_over_bound"),
        "imbalance_over_optimum": worst(plans, "imbalance_over_optimum"),
        "plans": len(plans),
        "plans_within_goal": sum(f["imbalance"] <= GOAL for f in plans),
        "plans_where_possible": len(possible),
        "best_plan_known": sum(f["imbalance_over_optimum"] is not None for f in plans),
        "fill_by_micro_batch_align": {align: worst(plans, f"fill_{align}") for align in MICRO_BATCH_ALIGNS},
        "fill_by_micro_batch_align_from_4_per_rank": {
            align: worst(several, f"fill_{align}") for align in MICRO_BATCH_ALIGNS
        },
        "longest_first": {
            "imbalance_where_possible": worst(possible, "longest_first_imbalance"),
            "plans_within_goal": sum(f["longest_first_imbalance"] <= GOAL for f in plans),
            "costliest_rank_over_ours": worst(plans, "longest_first_over_ours"),
            "fill": worst(plans, "longest_first_fill"),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--capacity", type=int, default=65_536, help="most tokens of a micro-batch")
    parser.add_argument("--timed", type=int, default=4096, help="sequences of the plans whose time is taken")
    parser.add_argument("--nodes", type=int, default=200_000, help="steps of the search for the best plan")
    args = parser.parse_args()
    cost = SequenceCost.of(read_model(QWEN3_8B))
    times = {dp: milliseconds(args.timed, dp, args.capacity, cost) for dp in RANKS}
    cells = {
        (count, dp): [measure(count, dp, seed, args.capacity, args.nodes, cost) for seed in range(args.seeds)]
        for count in SEQUENCES
        for dp in RANKS
    }
    report = {
        "benchmark": "packing",
        "plan_ms": max(median for median, _ in times.values()),
        **summary(cells),
        "plan_ms_by_ranks": times,
        "timed_sequences": args.timed,
        "seeds": args.seeds,
        "capacity": args.capacity,
        "sequence_align": SEQUENCE_ALIGN,
        "grid": [
            {"sequences": count, "ranks": dp} | {name: worst(cell, name) for name in cell[0]}
            for (count, dp), cell in cells.items()
        ],
        **stamp(__file__),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
