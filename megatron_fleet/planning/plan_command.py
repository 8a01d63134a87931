"""`mfleet plan`: what a run needs and how long its steps take, before a GPU is rented."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fleet.config.errors import UserError, say_lines

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config
    from megatron_fleet.planning.hardware import Gpu
    from megatron_fleet.planning.plan import Plan
    from megatron_fleet.planning.workload import Workload


KINDS = ("H100", "H200", "H20", "A100", "B200", "B300", "L4", "A10", "4090", "L40S")
"""Names in `hardware.GPUS`."""


def add_arguments(parser: argparse.ArgumentParser, overrides_help: str) -> None:
    """Add the arguments of ``mfleet plan``."""
    parser.add_argument("--gpu", metavar="NAME", help=f"kind of GPU: {', '.join(KINDS)} (cluster.gpu)")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU of another kind")
    parser.add_argument("--tokens", type=float, metavar="N", help="mean tokens of an episode (0.3 × max_context)")
    parser.add_argument(
        "--sampled", type=float, metavar="SHARE", help="share of these tokens that the policy samples (0.4)"
    )
    parser.add_argument("--turns", type=float, metavar="N", help="mean turns of an episode (20, at most max_turns)")
    parser.add_argument("--tool-seconds", type=float, metavar="S", help="mean seconds of a turn's tool calls (2)")
    accepted = "share of a drafter's tokens that is accepted (0.15 of ngram's, 0.6 of mtp's)"
    parser.add_argument("--accepted", type=float, metavar="SHARE", help=accepted)
    parser.add_argument("--price", type=float, metavar="P", help="price of a GPU-hour, in any currency")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw it, as SVG")
    parser.add_argument("--search", type=int, metavar="N", help="search instead for the fastest layouts on N GPUs")
    simulated = "simulate steps instead, on these GPUs and on twice as many, up to N"
    parser.add_argument("--simulate", type=int, nargs="?", const=1024, metavar="N", help=f"{simulated} (1024)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="simulated steps (%(default)s)")
    failures = "simulated share of episodes that fail and are played again (%(default)s)"
    parser.add_argument("--failures", type=float, default=0.02, metavar="SHARE", help=failures)
    mtbf = "simulated hours between two failures of one GPU (%(default)s); 0: no failures"
    parser.add_argument("--mtbf", type=float, default=50_000.0, metavar="H", help=mtbf)
    parser.add_argument("overrides", nargs="*", help=overrides_help)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan the run of the overrides and print it.

    Raises:
        UserError: the configuration is not valid, or the run does not fit; the plan is printed before.
    """
    from megatron_fleet.config import validate
    from megatron_fleet.config.load import load
    from megatron_fleet.config.sections.hosted import HOSTED
    from megatron_fleet.planning.hardware import gpu_of
    from megatron_fleet.planning.plan import make_plan, with_engines
    from megatron_fleet.planning.show import as_json, as_text, write_picture
    from megatron_fleet.planning.workload import Workload

    if args.price is not None and not args.price >= 0:
        raise UserError(f"--price must be 0 or more, not {args.price:g}.")
    if args.search is not None and args.simulate is not None:
        raise UserError("--search and --simulate answer different questions; give one of them.")
    config = with_engines(load(args.overrides))
    validate.check(config)
    workload = Workload.of(
        config.rollout, config.env, args.tokens, args.sampled, args.turns, args.tool_seconds, args.accepted
    )
    if config.policy.trainer == HOSTED:
        return _plan_hosted(args, config, workload)
    gpu = gpu_of(config.cluster, args.gpu, args.gpu_memory)
    if args.search is not None:
        return _search(args, config, gpu, workload)
    if args.simulate is not None:
        return _simulate(args, config, gpu, workload)
    plan = make_plan(config, gpu, workload)
    if args.json:
        print(json.dumps(as_json(plan, args.price), indent=2))
    else:
        say_lines(as_text(plan, args.price))
    if args.picture is not None and plan.step is not None:
        write_picture(plan, args.picture)
    if plan.problem is not None:
        raise UserError(f"The run does not fit into {plan.devices} {gpu.name}: {plan.problem} {_advice(plan)}")
    return 0


def _plan_hosted(args: argparse.Namespace, config: Config, workload: Workload) -> int:
    from megatron_fleet.planning.hosted_run import as_json, as_text, make_hosted_plan

    for flag in ("gpu", "gpu_memory", "price", "picture", "search", "simulate"):
        if getattr(args, flag) is not None:
            name = flag.replace("_", "-")
            raise UserError(f"--{name} is about GPUs, and policy.trainer=hosted uses none of yours; leave it out.")
    plan = make_hosted_plan(config, workload)
    if args.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        say_lines(as_text(plan))
    return 0


def _advice(plan: Plan) -> str:
    from megatron_fleet.planning.plan import larger_gpu

    other = larger_gpu(plan)
    search = f"--search {plan.devices} looks for another layout"
    return f"{search}." if other is None else f"It fits into as many {other} (--gpu {other}); {search}."


def _search(args: argparse.Namespace, config: Config, gpu: Gpu, workload: Workload) -> int:
    from megatron_fleet.planning import search

    if args.picture is not None:
        raise UserError("--picture draws a plan or a simulation; leave it out with --search.")
    found = search.search(config, gpu, workload, args.search)
    if args.json:
        print(json.dumps(search.as_json(found), indent=2))
        return 0
    say_lines(columns(search.as_rows(found)))
    say_lines(f"\nthe first: {' '.join(found[0].overrides) or 'the configuration as it is'}")
    return 0


def _simulate(args: argparse.Namespace, config: Config, gpu: Gpu, workload: Workload) -> int:
    from megatron_fleet.planning import scaling

    rows = scaling.simulate(config, gpu, workload, args.steps, args.failures, args.mtbf, args.simulate)
    if args.json:
        print(json.dumps(scaling.as_json(rows), indent=2))
    else:
        say_lines(columns(scaling.as_rows(rows)))
    if args.picture is not None:
        scaling.write_picture(rows, args.picture, f"{config.run.name} on {gpu.name}, {args.steps} simulated steps")
    return 0


def columns(rows: list[list[str]]) -> str:
    """Return rows of cells as aligned text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)
