"""`mfleet launch …`: submit a job and follow it, follow or cancel one that was submitted before."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fleet.config.errors import UserError, say, say_lines

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config
    from megatron_fleet.launch.job import Job, Launcher, Rendered

FOLDER = "launch"
"""Folder of a job's files, below ``run.out``."""


def add_arguments(parser: argparse.ArgumentParser, overrides_help: str) -> None:
    """Add the arguments of ``mfleet launch``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="check and print what would be submitted")
    what.add_argument("--detach", action="store_true", help="submit, and do not follow the log")
    what.add_argument("--follow", type=Path, metavar="RUN", help="follow the job of this run.out")
    what.add_argument("--cancel", type=Path, metavar="RUN", help="end the job of this run.out")
    parser.add_argument("--multirun", action="store_true", help="one run for each combination of key=a,b values")
    parser.add_argument("--out", type=Path, metavar="DIR", help="short for run.out=DIR; of a sweep: DIR/0, DIR/1, …")
    parser.add_argument("overrides", nargs="*", help=f"cluster=slurm, cluster.nodes=2, …; {overrides_help}")


def main(args: argparse.Namespace, environ: Mapping[str, str], check: Callable[[Config], None]) -> int:
    """Execute ``mfleet launch``; returns the exit status, when it follows a job that of the job.

    Args:
        environ: environment of this process.
        check: refuses a configuration that could not run here.

    Raises:
        UserError: the job cannot work, is refused, or is unknown.
    """
    if args.follow or args.cancel:
        if args.overrides or args.multirun or args.out:
            raise UserError("--follow and --cancel take a run's folder; leave out overrides, --multirun and --out.")
        return _follow(args.follow / FOLDER) if args.follow else _cancel(args.cancel / FOLDER)
    from megatron_fleet.config.sweep import sweep
    from megatron_fleet.launch.job import write_files, write_record
    from megatron_fleet.launch.plan import plan

    overrides = [*args.overrides, *([f"run.out={args.out}"] if args.out else [])]
    job = plan(sweep(overrides) if args.multirun else [overrides], environ, check)
    launcher = _launcher(job.config.launch.kind)
    launcher.check(job)
    rendered = launcher.render(job)
    for note in rendered.notes:
        say(f"mfleet: {note}", sys.stderr)
    if args.dry_run:
        say_lines(_described(job, rendered))
        return 0
    write_files(job, rendered)
    record = launcher.submit(job, rendered)
    write_record(job.folder, record)
    _say_submitted(job, record.ids)
    return 0 if args.detach else _follow(job.folder)


def _launcher(kind: str) -> Launcher:
    from megatron_fleet.launch.kubernetes import Kubernetes
    from megatron_fleet.launch.local import Local, Torchrun
    from megatron_fleet.launch.skypilot import SkyPilot
    from megatron_fleet.launch.slurm import Slurm

    launchers: dict[str, Launcher] = {
        "local": Local(),
        "torchrun": Torchrun(),
        "slurm": Slurm(),
        "skypilot": SkyPilot(),
        "kubernetes": Kubernetes(),
    }
    return launchers[kind]


def _described(job: Job, rendered: Rendered) -> str:
    """Return what would be submitted: files, commands, names of secrets."""
    lines = [f"# {job.folder / name}\n{text}" for name, text in rendered.files.items()]
    lines.append("# commands")
    lines += [f"#   {shlex.join(command)}" for command in rendered.commands]
    lines.append(f"# secrets that the job gets from this shell: {', '.join(job.secrets) or 'none'}")
    lines.append(f"# commit: {job.commit or 'none, as there are uncommitted changes'}")
    return "\n".join(lines)


def _say_submitted(job: Job, ids: list[str]) -> None:
    out = job.folder.parent
    say(f"mfleet: submitted {job.name} ({job.config.launch.kind} {', '.join(ids)})", sys.stderr)
    say(f"mfleet: `mfleet launch --follow {out}` follows it, `mfleet launch --cancel {out}` ends it", sys.stderr)
    if len(job.runs) > 1:
        outs = " ".join(str(run.out) for run in job.runs)
        say(f"mfleet: to compare its runs: mfleet runs compare {outs}", sys.stderr)


def _follow(folder: Path) -> int:
    from megatron_fleet.launch.job import read_record

    record = read_record(folder)
    try:
        state = _launcher(record.kind).follow(record, folder)
    except KeyboardInterrupt:
        say(f"mfleet: the job keeps running; `mfleet launch --cancel {folder.parent}` ends it", sys.stderr)
        return 130
    say(f"mfleet: {record.name}: {state.words}", sys.stderr)
    return state.status or 0


def _cancel(folder: Path) -> int:
    from megatron_fleet.launch.job import read_record

    record = read_record(folder)
    _launcher(record.kind).cancel(record, folder)
    say(f"mfleet: cancellation of {record.name} requested", sys.stderr)
    return 0
