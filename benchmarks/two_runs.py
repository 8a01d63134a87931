"""Training steps of one run alone and of two at once on one machine, by the way in which OpenMP threads wait.
Prints one line of JSON.

Each run is the ranks of a quickstart without engines, with ``--threads`` threads on cores that both share.
``seconds.WAY.alone`` and ``together`` are medians of steps of ``--sequences`` sequences, ``slower`` is the second ÷ the
first: 2 when nothing is lost. WAY is ``passive``, as ranks on CPUs are started, or ``active``, libgomp's default.
``passive_alone`` is passive ÷ active of one run alone. The ways take turns, so that a busy machine disturbs both alike.

    python benchmarks/two_runs.py [--threads 2] [--sequences 128] [--steps 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from measured import stamp

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.load import load
from megatron_fleet.trainer.base import AdamParams, LossSpec
from megatron_fleet.trainer.group import TrainerGroup, open_trainer

WAYS = {"passive": {"OMP_WAIT_POLICY": "passive"}, "active": {"GOMP_SPINCOUNT": "300000"}}
"""Variables of each way; 300,000 rounds are libgomp's default when no wait policy is set."""
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
RUNS = 2
SHORTEST, LONGEST = 200, 1000
"""Tokens of sequences, as in the quickstart."""


def make_data(count: int) -> list[Datum]:
    """Sequences of random tokens, the last eighth of each trained."""
    rng = np.random.default_rng(0)
    data = []
    for _ in range(count):
        tokens = int(rng.integers(SHORTEST, LONGEST))
        scale, mask = 1 / (count * tokens), np.zeros(tokens, bool)
        mask[-tokens // 8 :] = True
        weights, logprobs = (np.where(mask, value, 0).astype(np.float32) for value in (scale, -5.0))
        data.append(Datum(rng.integers(0, 256, tokens).astype(np.int32), mask, weights, logprobs, scale))
    return data


async def step(trainers: Sequence[TrainerGroup], data: list[Datum], loss: LossSpec) -> float:
    """Seconds until all trainers have done a step."""

    async def one(trainer: TrainerGroup) -> None:
        await trainer.forward_backward(data, loss)
        await trainer.optim_step(AdamParams(1e-4))

    began = time.perf_counter()
    await asyncio.gather(*map(one, trainers))
    return time.perf_counter() - began


async def measure(folder: Path, threads: int, sequences: int, steps: int) -> dict[str, dict[str, float]]:
    """Median seconds of a step, by way of waiting and number of runs."""
    config = load(["experiment=quickstart", f"policy.threads={threads}", f"run.out={folder}"])
    data, loss = make_data(sequences), LossSpec.of(config.algorithm)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        groups: dict[str, list[TrainerGroup]] = {}
        for way, variables in WAYS.items():
            for name in NAMES:
                os.environ.pop(name, None)
            os.environ.update(variables)
            groups[way] = [
                await stack.enter_async_context(
                    open_trainer(
                        config.model_copy(update={"run": config.run.model_copy(update={"out": out})}), "random"
                    )
                )
                for out in (f"{folder}/{way}{number}" for number in range(RUNS))
            ]
        for number in range(steps + 1):
            for way, trainers in groups.items():
                for name, some in (("alone", trainers[number % RUNS :][:1]), ("together", trainers)):
                    spent = await step(some, data, loss)
                    if number:  # the first step of a process allocates its memory
                        seconds[way, name].append(spent)
    return {
        way: {name: round(statistics.median(seconds[way, name]), 4) for name in ("alone", "together")} for way in WAYS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="of each run")
    parser.add_argument("--sequences", type=int, default=128, help="of a step")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = asyncio.run(measure(Path(folder), given.threads, given.sequences, given.steps))
    report = {
        "benchmark": "two_runs",
        "slower": {way: round(found["together"] / found["alone"], 3) for way, found in seconds.items()},
        "passive_alone": round(seconds["passive"]["alone"] / seconds["active"]["alone"], 3),
        "seconds": seconds,
        **vars(given),
        **stamp(__file__),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
