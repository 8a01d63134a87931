"""Share of a step's groups that teach something, under different mixtures. Prints one line of JSON.

A made-up policy on made-up environments: task i of an environment is solved with probability sigmoid(ability + d_i),
the difficulties d_i drawn once from a normal distribution. An environment's ability grows by ``gain`` with each of its
groups whose rewards differ, so that it may be dead, come alive and saturate, and a mixture has to follow. With a gain
of 0 the policy never changes. A prompt is informative when the rewards of its group differ. Every mixture meets the
same tasks and the same seeds.

    python benchmarks/mixture.py [--seeds 10] [--steps 150] [--prompts 64] [--samples 8] [--plot mixture.svg]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measured import stamp

from megatron_fleet.config.sections.data import CurriculumConfig, MixtureConfig
from megatron_fleet.data.sampler import make_sampler
from megatron_fleet.data.task import Task
from megatron_fleet.telemetry.charts import Chart, Series, write_svg

GAINS = {"fixed": 0.0, "learning": 0.004}
SIGNAL = CurriculumConfig(signal_weights=True)
MIXTURES = {
    "proportional": MixtureConfig(),
    "temperature 2": MixtureConfig(weights="temperature", temperature=2.0),
    "uniform": MixtureConfig(weights="uniform"),
    "proportional, signal": MixtureConfig(curriculum=SIGNAL),
    "temperature 2, signal": MixtureConfig(weights="temperature", temperature=2.0, curriculum=SIGNAL),
    "temperature 2, signal, deferral": MixtureConfig(
        weights="temperature", temperature=2.0, curriculum=CurriculumConfig(signal_weights=True, defer_after=2)
    ),
}


@dataclass(frozen=True, slots=True)
class World:
    """One environment: ``tasks``, and the mean and spread of their log-odds before training."""

    tasks: int
    mean: float
    spread: float


WORLDS = {
    "dead": World(4700, -9.0, 1.0),
    "nearly-dead": World(900, -5.0, 1.5),
    "hard": World(2000, -2.0, 1.5),
    "middle": World(500, 0.0, 1.5),
    "small": World(100, 0.5, 1.5),
    "saturated": World(1000, 6.0, 1.0),
}


class Policy:
    """Solves tasks by chance, and learns."""

    def __init__(self, worlds: dict[str, World], gain: float, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self.gain, self.ability = gain, dict.fromkeys(worlds, 0.0)
        self.odds = {env: rng.normal(w.mean, w.spread, w.tasks) for env, w in worlds.items()}
        self.rng = np.random.default_rng([seed, 2])

    def chances(self, env: str) -> np.ndarray:
        """Pass rate of each task, float64 ``[tasks]``."""
        return 1 / (1 + np.exp(-(self.odds[env] + self.ability[env])))

    def play(self, batch: list[Task], samples: int) -> list[tuple[str, list[float]]]:
        """Task key and rewards of each group; the policy learns when all are played."""
        results, informative = [], []
        for task in batch:
            chance = self.chances(task.env_key)[int(task.key.rsplit("/", 1)[1])]
            rewards = (self.rng.random(samples) < chance).astype(float).tolist()
            results.append((task.key, rewards))
            if min(rewards) != max(rewards):
                informative.append(task.env_key)
        for env in informative:
            self.ability[env] += self.gain
        return results


def tasks_of(worlds: dict[str, World]) -> list[Task]:
    return [Task(f"{env}/{i}", "", env, "") for env, world in worlds.items() for i in range(world.tasks)]


def run(
    worlds: dict[str, World], mixture: MixtureConfig, gain: float, seed: int, steps: int, prompts: int, samples: int
) -> tuple[list[float], list[float], dict[str, float]]:
    """Share of informative groups and mean pass rate over environments after each step; pass rates at the end."""
    policy, sampler = Policy(worlds, gain, seed), make_sampler(tasks_of(worlds), prompts, seed, mixture)
    shares, solved, rates = [], [], {}
    for _ in range(steps):
        results = policy.play(sampler.next(), samples)
        sampler.observe(results)
        shares.append(sum(min(r) != max(r) for _, r in results) / prompts)
        rates = {env: float(policy.chances(env).mean()) for env in worlds}
        solved.append(float(np.mean(list(rates.values()))))
    return shares, solved, rates


def measure(seeds: int, steps: int, prompts: int, samples: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Gain → mixture → informative share with its deviation over seeds, pass rates at the end, curves over steps."""
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for gain_name, gain in GAINS.items():
        for name, mixture in MIXTURES.items():
            runs = [run(WORLDS, mixture, gain, seed, steps, prompts, samples) for seed in range(seeds)]
            shares, solved = (np.array([one[i] for one in runs]) for i in (0, 1))
            out.setdefault(gain_name, {})[name] = {
                "informative": round(float(shares.mean()), 3),
                "deviation_over_seeds": round(float(shares.mean(1).std()), 4),
                "pass_rate_at_the_end": round(float(solved[:, -1].mean()), 3),
                "by_environment": {env: round(float(np.mean([one[2][env] for one in runs])), 3) for env in WORLDS},
                "curves": {"informative": shares.mean(0), "pass_rate": solved.mean(0)},
            }
    return out


def plot(figures: dict[str, dict[str, dict[str, Any]]], target: Path) -> None:
    """Draw the informative share of a fixed policy (mean of ten steps) and the pass rate of one that learns, as SVG."""
    drawn = []
    for gain, curve, window, title in (
        ("learning", "pass_rate", 1, "pass rate, mean of environments, policy that learns"),
        ("fixed", "informative", 10, "informative groups, policy that does not change"),
    ):
        lines = []
        for name, values in figures[gain].items():
            smooth = np.convolve(values["curves"][curve], np.full(window, 1 / window), "valid")
            points = tuple((float(step), float(value)) for step, value in enumerate(smooth, window))
            lines.append(Series(name, points))
        drawn.append(Chart(title, tuple(lines)))
    write_svg(target, "Mixtures", drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--plot", type=Path, help="also draw the curves into this SVG file")
    args = parser.parse_args()
    figures = measure(args.seeds, args.steps, args.prompts, args.samples)
    if args.plot:
        plot(figures, args.plot)
    for mixtures in figures.values():
        for values in mixtures.values():
            del values["curves"]
    tasks = {env: world.tasks for env, world in WORLDS.items()}
    sizes = {"seeds": args.seeds, "steps": args.steps, "prompts": args.prompts, "samples": args.samples}
    print(json.dumps({"benchmark": "mixture", **sizes, "tasks": tasks, "mixtures": figures, **stamp(__file__)}))


if __name__ == "__main__":
    main()
