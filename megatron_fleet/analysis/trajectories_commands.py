"""`mfleet trajectories`: its options, and what it prints."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

from megatron_fleet.config.errors import UserError, say, say_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mfleet trajectories``."""
    parser.add_argument("place", metavar="RUN", help="a run's folder, its address in a store, or a .parquet or .jsonl")
    parser.add_argument("ids", nargs="*", metavar="ID", help="episodes to print whole, as the list names them")
    parser.add_argument("--kind", choices=("train", "eval", "greedy"), help="of training steps or evaluations")
    parser.add_argument("--step", metavar="N[-M]", help="of this step or evaluation, or of a range of them")
    for name, of in (("env", "environment"), ("task", "key of the task"), ("outcome", "reason of the end")):
        parser.add_argument(f"--{name}", metavar="PATTERN", help=f"{of}; * and ? stand for any characters")
    parser.add_argument("--reward", metavar="MIN..MAX", help="range, either end may be missing, one number, or unknown")
    parser.add_argument("--text", default="", help="in a message, the reason or the final answer")
    parser.add_argument("--limit", type=int, metavar="N", help="first N only (default: 50 in the list)")
    parser.add_argument("--show", action="store_true", help="print the conversations (default limit: 3)")
    parser.add_argument("--out", dest="file", type=Path, metavar="FILE", help="write to FILE.jsonl, .parquet or .html")
    parser.set_defaults(run=_trajectories)


def _trajectories(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis import runs, trajectories
    from megatron_fleet.telemetry.shards import pyarrow_is_there

    pyarrow_is_there()
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit={args.limit}: give 1 or more.")
    low, high, unknown = _rewards(args.reward)
    query = trajectories.Query(
        kinds=None if args.kind is None else (trajectories.KINDS[args.kind],),
        steps=_steps(args.step),
        env=args.env,
        task=args.task,
        outcome=args.outcome,
        rewards=None if args.reward is None or unknown else (low, high),
        unknown=unknown,
        text=args.text,
        ids=tuple(args.ids),
    )
    place = trajectories.Place(args.place)
    limit = args.limit or (math.inf if args.file or args.ids else 3 if args.show else 50)
    kept, matching, total = [], 0, 0
    for found in trajectories.find(place, query, limit):
        total += found.total
        matching += found.matching
        if found.rows:
            kept.append(found)
    if args.ids and matching < len(set(args.ids)):
        missing = next(name for name in args.ids if not any(name in found.ids() for found in kept))
        raise UserError(f"{args.place}: there is no episode {missing} that matches; leave the ids out to list them.")
    if args.file:
        say(f"{trajectories.export(place, kept, args.file)} of {total} episodes: {args.file}")
        return 0
    pairs = [(name, r) for found in kept for name, r in zip(found.ids(), found.records, strict=True)]
    if args.show or args.ids:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for name, record in pairs:
            print(trajectories.conversation(name, record, colour) + "\n", flush=True)
    elif pairs:
        rows = [tuple(map(trajectories.shown, trajectories.line(name, record))) for name, record in pairs]
        say_lines(runs.columns([trajectories.HEADINGS, *rows]))
    say(f"{len(pairs)} of {matching} matching episodes, {total} in all" if matching else f"none of {total} match")
    return 0


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or (last and not last.isdecimal()) or (text.endswith("-")):
        raise UserError(f"--step={text} is neither a step nor a range of steps; write 12 or 10-20.")
    return int(first), int(last or first)


def _rewards(text: str | None) -> tuple[float, float, bool]:
    """Return the lowest and highest reward, and whether it must be unknown instead."""
    if text is None or text == "unknown":
        return -math.inf, math.inf, text is not None
    low, dots, high = text.partition("..")
    try:
        first = float(low) if low else -math.inf
        last = float(high) if high else math.inf if dots else first
    except ValueError:
        first = last = math.nan
    if not first <= last:
        raise UserError(f"--reward={text} is not a range; write 0.5..1, ..0, 1, or unknown.")
    return first, last, False
