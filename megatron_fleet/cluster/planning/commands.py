"""`mfleet plan`: what a run needs and how long its steps take, before a GPU is rented."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_fleet.config.errors import UserError, say


def add_arguments(parser: argparse.ArgumentParser, overrides_help: str) -> None:
    """Add the arguments of ``mfleet plan``."""
    parser.add_argument("--gpu", default="H100", metavar="NAME", help="kind of GPU: H100, H200, H20, A100, B200, B300")
    parser.add_argument("--tokens", type=float, metavar="N", help="mean tokens of an episode (0.3 × max_context)")
    parser.add_argument("--sampled", type=float, metavar="SHARE", help="share of them that is sampled (0.4)")
    parser.add_argument("--turns", type=float, metavar="N", help="mean turns of an episode (20, at most max_turns)")
    parser.add_argument("--tool-seconds", type=float, metavar="S", help="mean seconds of a turn's tool calls (2)")
    parser.add_argument("--price", type=float, metavar="P", help="price of a GPU-hour, in any currency")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw it, as SVG")
    parser.add_argument("overrides", nargs="*", help=overrides_help)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan the run of the overrides and print it.

    Raises:
        UserError: the configuration is not valid, or the run does not fit; the plan is printed before.
    """
    from megatron_fleet.cluster.planning.hardware import gpu_named
    from megatron_fleet.cluster.planning.plan import make_plan
    from megatron_fleet.cluster.planning.show import as_json, as_text, write_picture
    from megatron_fleet.cluster.planning.workload import Workload
    from megatron_fleet.config import validate
    from megatron_fleet.config.load import load

    if args.price is not None and not args.price >= 0:
        raise UserError(f"--price {args.price:g} is no price; give 0 or more.")
    config = load(args.overrides)
    validate.check(config)
    gpu = gpu_named(args.gpu)
    plan = make_plan(config, gpu, Workload.of(config, args.tokens, args.sampled, args.turns, args.tool_seconds))
    if args.json:
        print(json.dumps(as_json(plan, args.price), indent=2))
    else:
        say(as_text(plan, args.price))
    if args.picture is not None and plan.step is not None:
        write_picture(plan, args.picture)
    if plan.problem is not None:
        raise UserError(f"The run does not fit into {plan.devices} {gpu.name}: {plan.problem}")
    return 0
