"""Fill in the tables of ``docs/run/planning.md`` and draw its picture. Usage: python tools/planning_page.py"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import measured_points  # noqa: E402
import memory_points  # noqa: E402
import step_points  # noqa: E402

from megatron_fleet.config.load import load  # noqa: E402
from megatron_fleet.models.hf_config import read_model  # noqa: E402
from megatron_fleet.planning import rollout, scaling, step, training, workload  # noqa: E402
from megatron_fleet.planning.hardware import GPUS, gpu_of  # noqa: E402
from megatron_fleet.planning.memory.engine_memory import GIB, engine_memory  # noqa: E402
from megatron_fleet.planning.plan import Plan, make_plan  # noqa: E402
from megatron_fleet.planning.shapes import shape_of  # noqa: E402
from megatron_fleet.planning.simulation import Simulation  # noqa: E402
from megatron_fleet.planning.workload import Workload  # noqa: E402

PAGE = ROOT / "docs" / "run" / "planning.md"
PICTURE = PAGE.with_suffix(".svg")
DRAWN, LARGEST = "qwen3_8b_fleet", "kimi_k2_5_fleet"
PUBLISHED = {"qwen3_8b_bench": {"mean": 945.0, "sampled": 795 / 945, "tool_s": 0.0}}
"""Experiment that is compared with a published run → the lengths of that run's episodes."""
WITHOUT_STEPS = ("qwen3_8b_fleet_eval",)
EXPERIMENTS = ("qwen3_8b_fleet", "qwen3_5_35b_a3b_fleet")
LEVERS = {
    "every step waits for all its episodes": (),
    "unfinished episodes continue, at most one version late": ("rollout.max_staleness=1",),
    "two versions late": ("rollout.max_staleness=2",),
    "groups are trained on in any order": ("rollout.batch.window=null",),
    "n-grams are drafted where at most 8 sequences are left": (
        "rollout.engine.speculative.method=ngram", "rollout.engine.speculative.max_sequences=8",
    ),
}  # fmt: skip
"""What each lever of `levers` is → its keys."""
LEVER_STEPS = 40


@cache
def planned(experiment: str) -> Plan:
    """The plan of an experiment on the GPUs that it names."""
    config = load([f"experiment={experiment}"])
    return make_plan(
        config, gpu_of(config.cluster), Workload.of(config.rollout, config.env, **PUBLISHED.get(experiment, {}))
    )


@cache
def names() -> tuple[str, ...]:
    """Experiments that name their GPUs and train, those with the fewest GPUs first."""
    found = [path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")]
    found = [name for name in found if load([f"experiment={name}"]).cluster.gpu is not None]
    return tuple(sorted(set(found) - {*WITHOUT_STEPS}, key=lambda name: (planned(name).devices, name)))


def experiments() -> str:
    """Time, memory and cost of each experiment."""
    head = ["experiment", "GPUs", "train GiB", "roll GiB", "host GiB", "rollout s", "training s", "step s"]
    lines = [f"| {' | '.join([*head, 'GPU-hours', 'bottleneck'])} |", "|---" * 10 + "|"]
    for name in names():
        plan = planned(name)
        assert plan.step is not None and plan.problem is None
        peak = {
            phase: max(p.total for device in plan.memory.devices for p in device.phases if p.name == phase) / GIB
            for phase in ("train", "roll")
        }
        cells = [f"{plan.devices} {plan.gpu.name}", f"{peak['train']:.0f}", f"{peak['roll']:.0f}"]
        cells += [f"{sum(plan.memory.host.values()) / GIB:.0f}"]
        cells += [f"{seconds:.0f}" for seconds in (plan.step.seconds("rollout"), plan.step.seconds("training"))]
        cells += [f"{plan.step.total:.0f}", f"{plan.gpu_hours:.2f}", ", ".join(plan.step.binds)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def largest() -> str:
    """Why the largest experiment has no layout for H100."""
    config, gpu = load([f"experiment={LARGEST}"]), GPUS["H100"]
    hf_config, _ = shape_of(config.model.path)
    model = read_model(hf_config)
    two = config.rollout.engine.model_copy(update={"tensor_parallel": 2 * gpu.per_host})
    spread = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": two})})
    one, over_two = (engine_memory(c, model, hf_config) for c in (config, spread))
    *_, roll = make_plan(config, gpu, Workload.of(config.rollout, config.env)).memory.devices[0].phases
    needed = (roll.total - roll.parts["KV cache"]) / GIB
    alone = (one.fixed + roll.parts["engine context"]) / GIB
    sequence, memory = one.token * config.rollout.max_context / GIB, gpu.memory / GIB
    assert needed > memory > alone > memory - sequence
    assert needed + sequence - (one.weights - over_two.weights) / GIB < memory
    return (
        f"`{LARGEST}` has no layout for H100. The INT4 weights take {one.weights / GIB:.1f} GiB of each of an engine's "
        f"{config.rollout.engine.tensor_parallel} GPUs, its largest step and its graphs "
        f"{(one.step + one.graphs) / GIB:.1f}, contexts and communicators of engine and idle trainer "
        f"{needed - one.fixed / GIB:.1f}: {needed:.1f} of {memory:.1f} GiB, and no KV cache yet, of which a sequence "
        f"of {config.rollout.max_context:,} tokens takes {sequence:.1f}. Without the trainer "
        f"(`rollout.engine.colocated=false`) they take {alone:.1f}, which leaves less than one sequence. On the GPUs "
        f"of two hosts the weights would take {over_two.weights / GIB:.1f} each and all would fit, but an engine does "
        f"not extend over several hosts: its processes, its devices and the memory through which it receives weights "
        f"are those of one."
    )


def constants() -> str:
    """The constants of the time model."""
    rows = {
        "dense layers' products, share of the peak": training.DENSE,
        "attention, share of the peak": training.ATTENTION,
        "these two of PyTorch's layers (`policy.kernels=torch`)": f"{training.TORCH_DENSE}, {training.TORCH_ATTENTION}",
        "experts' products, share of the peak": training.EXPERTS,
        "tokens of an expert at half of that speed": training.HALF_SPEED_TOKENS,
        "pass without gradients, × the forward part of training": training.FORWARD_ONLY,
        "products in FP8, × BF16": training.FP8_SPEED,
        "copies in a GPU, NVLink, network: shares": f"{training.HBM}, {training.NVLINK}, {training.NETWORK}",
        "an all-to-all, of these": training.ALL_TO_ALL,
        "launching a layer forward, dense and with experts": f"{1e3 * training.LAYER_S:g}, "
        f"{1e3 * training.EXPERT_LAYER_S:g} ms",
        "rest of an update": f"{training.UPDATE_S} s",
        "decoding, share of the memory's bandwidth; experts": f"{rollout.DECODE}, {rollout.EXPERT_READS}",
        "decoding, the host's part of a step; each sequence": f"{1e3 * rollout.STEP_S:g} ms, "
        f"{1e6 * rollout.SEQUENCE_S:g} µs",
        "decoding, at least for a layer; latent attention in addition": f"{1e6 * rollout.LAYER_KERNELS_S:g}, "
        f"{1e6 * rollout.LATENT_S:g} µs",
        "small all-reduce in a host; for each doubling of hosts": f"{1e6 * rollout.MESSAGE_S:g}, "
        f"{1e6 * rollout.NETWORK_MESSAGE_S / 2:g} µs",
        "prompts, share of the peak": rollout.PREFILL,
        "weight sync": f"{step.SYNC_S} s, and {step.SYNC_RATE / 1e9:g} GB/s",
        "Adam on the host, and on one thread of it": f"{training.HOST_ADAM / 1e9:g} and "
        f"{training.THREAD_ADAM / 1e9:g} GB/s",
        "checkpoint on disk": f"{step.DISK / 1e9:g} GB/s a host",
        "mean length of an episode, of rollout.max_context": workload.MEAN_SHARE,
        "sampled share of it": workload.SAMPLED_SHARE,
        "sigma of the logarithm of lengths": workload.SIGMA,
        "turns; seconds of a turn's tools": f"{workload.TURNS}, {workload.TOOL_S:g} s",
        "drafted tokens that are accepted: ngram, mtp": f"{workload.ACCEPTED['ngram']}, {workload.ACCEPTED['mtp']}",
    }
    return "\n".join(["| estimate | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def summary() -> str:
    """Table of the number of points within the goals."""
    times = list(step_points.errors().values())
    steps = [error for (_, phase), error in step_points.errors().items() if phase == "step"]
    memory = [memory_points.predicted(p) / p.measured - 1 for p in memory_points.POINTS]
    memory.append(memory_points.host_predicted() / memory_points.HOST_MEASURED - 1)
    rows = [
        ("memory", memory, 0.10),
        ("seconds of a step", steps, 0.25),
        ("seconds of a step or a phase", times, 0.25),
    ]
    lines = ["| | points | goal | within it | mean error | largest |", "|---" * 6 + "|"]
    for name, errors, goal in rows:
        sizes = [abs(error) for error in errors]
        within = sum(size <= goal for size in sizes)
        mean = sum(sizes) / len(sizes)
        lines.append(f"| {name} | {len(sizes)} | {goal:.0%} | {within} | {mean:.0%} | {max(sizes):.0%} |")
    return "\n".join(lines)


@cache
def simulated() -> list[scaling.Row]:
    """The simulation of the picture."""
    config = load([f"experiment={DRAWN}"])
    return scaling.simulate(
        config,
        GPUS["H100"],
        Workload.of(config.rollout, config.env),
        steps=6,
        failures=0.02,
        mtbf_hours=50_000,
        most=64,
    )


def levers() -> str:
    """Simulated seconds of a step of the users' experiments, with one lever after the other."""
    lines = [f"| levers, each with those above | {' | '.join(EXPERIMENTS)} |", "|---" * (1 + len(EXPERIMENTS)) + "|"]
    added: tuple[str, ...] = ()
    for text, overrides in LEVERS.items():
        added += overrides
        cells = []
        for experiment in EXPERIMENTS:
            config = load([f"experiment={experiment}", "algorithm=importance_weighted", *added])
            made = Workload.of(config.rollout, config.env)
            setup = scaling.setup_of(config, gpu_of(config.cluster), made, config.rollout.max_staleness)
            cells.append(f"{Simulation(setup).play(LEVER_STEPS).step_s:.0f} s")
        lines.append(f"| {text}{''.join(f' `{each}`' for each in overrides)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def simulation() -> str:
    """The simulated runs."""
    head, *rows = scaling.as_rows(simulated())
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


TABLES = {
    "experiments": experiments,
    "largest": largest,
    "summary": summary,
    "levers": levers,
    "points": lambda: step_points.table().rstrip(),
    "measured": measured_points.table,
    "decoding": measured_points.decoding_table,
    "constants": constants,
    "simulation": simulation,
}


def page(text: str) -> str:
    """Return the page with its tables made anew. Each stands between ``<!-- table: NAME -->`` and ``<!-- end -->``."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def draw(path: Path) -> None:
    """Draw the simulation."""
    scaling.write_picture(simulated(), path, f"{DRAWN} on H100, simulated")


def main() -> None:
    """Write page and picture."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PICTURE)


if __name__ == "__main__":
    main()
