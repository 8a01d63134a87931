"""`mfleet runs …`: list, show, compare and prune runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_fleet.config.errors import UserError, say, say_lines

PLACE = "a run's folder (run.out), or its address in a store, s3://… or gs://bucket/…/ID"


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``mfleet runs``."""
    commands = parser.add_subparsers(required=True, metavar="command")
    listing = commands.add_parser("list", help="the runs in folders and buckets, a line each")
    listing.add_argument("places", nargs="*", default=["runs"], help="folders of runs, or s3://… or gs://… (runs)")
    listing.add_argument("--json", action="store_true", help="print them as JSON")
    listing.set_defaults(run=_list)
    show = commands.add_parser("show", help="one run: its state, its checkpoints, its main settings")
    show.add_argument("place", help=PLACE)
    show.set_defaults(run=_show)
    diff = commands.add_parser("diff", help="keys that two runs set differently")
    diff.add_argument("place", help=PLACE)
    diff.add_argument("other", help="the other one")
    diff.set_defaults(run=_diff)
    comparing = commands.add_parser("compare", help="curves, results and settings of several runs as one HTML page")
    comparing.add_argument("places", nargs="+", metavar="RUN", help=f"{PLACE}; the others are compared with the first")
    page = Path("comparison.html")
    comparing.add_argument("--out", dest="page", type=Path, default=page, metavar="FILE", help="(%(default)s)")
    comparing.set_defaults(run=_compare)
    pruning = commands.add_parser("prune", help="remove old checkpoints of a run, and those that no longer count")
    pruning.add_argument("place", help=PLACE)
    pruning.add_argument("--keep", type=_at_least_one, default=1, metavar="N", help="newest to keep (%(default)s)")
    pruning.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    pruning.set_defaults(run=_prune)


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _list(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis import runs

    found = [run for place in args.places for run in runs.find_runs(place)]
    if args.json:
        say_lines(runs.as_json(found))
    else:
        say_lines(runs.as_table(found) if found else f"no runs in {', '.join(args.places)}")
    return 0


def _show(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis import runs
    from megatron_fleet.config.units import size

    run = runs.find_run(args.place)
    say_lines(runs.as_table([run]))
    rows = [(f"step {saved.step}", size(saved.nbytes)) for saved in run.checkpoints]
    say_lines("\n" + (runs.columns([("checkpoint", "size"), *rows]) if rows else "no checkpoint"))
    if run.superseded:
        say(f"{run.superseded} checkpoints no longer count; `mfleet runs prune {args.place}` removes them")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis import runs
    from megatron_fleet.config.differences import differences

    one, other = runs.find_run(args.place), runs.find_run(args.other)
    for run in (one, other):
        if not run.config:
            raise UserError(f"{run.place} has no recorded configuration; compare runs that have a config.json.")
    names = [runs.folder_name(place) for place in (args.place, args.other)]
    names = names if names[0] != names[1] else [args.place, args.other]
    rows = [(key, *map(str, values)) for key, *values in differences(one.config, other.config)]
    say_lines(runs.columns([("key", *names), *rows]) if rows else "all settings are equal")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis.comparison import write_comparison

    say_lines(write_comparison(args.places, args.page))
    return 0


def _prune(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis import runs

    names = runs.prune(args.place, args.keep, not args.dry_run)
    verb = "would be removed" if args.dry_run else "removed"
    say(f"{verb}: {', '.join(names)}" if names else "nothing to remove")
    return 0
