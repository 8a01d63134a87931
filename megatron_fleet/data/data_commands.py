"""`mfleet data …`: inspect task files, prepare them, make them of other tables, export the embedded ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fleet.config.errors import UserError, say, say_lines

if TYPE_CHECKING:
    from megatron_fleet.config.sections.data import DataConfig

OVERRIDES = "data=preset or data.key=value; docs/reference/config.md lists the keys"
SOURCE = "a task file (JSON, JSON Lines, CSV, Parquet), one in s3://… or gs://…, a prepared folder, or `embedded`"
TABLE = "a file (JSON, JSON Lines, CSV, Parquet), the folder of a dataset, or a dataset on the Hugging Face hub"


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``mfleet data``."""
    commands = parser.add_subparsers(required=True, metavar="command")

    look = commands.add_parser("inspect", help="check every row of a task file and summarize its contents")
    look.add_argument("source", help=SOURCE)
    look.add_argument("--json", action="store_true", help="print everything as JSON")
    look.add_argument("overrides", nargs="*", help=OVERRIDES)
    look.set_defaults(run=_inspect)

    prepare = commands.add_parser("prepare", help="select and split tasks; write them with their split manifest")
    prepare.add_argument("source", help=SOURCE)
    prepare.add_argument("--out", required=True, metavar="DIR", help="new folder, s3://… or gs://bucket/folder")
    prepare.add_argument("--previous", metavar="FILE", help="split.json whose tasks stay on their sides")
    prepare.add_argument("overrides", nargs="*", help=OVERRIDES)
    prepare.set_defaults(run=_prepare)

    make = commands.add_parser("from", help="make a task file of a table of questions")
    make.add_argument("source", help=TABLE)
    make.add_argument("--prompt", required=True, metavar="COLUMN", help="column with the questions")
    make.add_argument(
        "--answer", metavar="COLUMN", help="column that the reward compares with; the policy never sees it"
    )
    make.add_argument("--key", metavar="COLUMN", help="column with task keys (default: a hash of prompt and answer)")
    make.add_argument("--environment", metavar="NAME", help="name in metrics (default: the source's)")
    make.add_argument("--split", default="train", metavar="NAME", help="split of a dataset (default: train)")
    make.add_argument("--subset", metavar="NAME", help="configuration of a dataset that has several")
    make.add_argument("--out", required=True, type=Path, metavar="FILE", help="new task file, named *.json")
    make.set_defaults(run=_from)

    export = commands.add_parser("export", help="write the embedded fleet's tasks to a file")
    export.add_argument("file", type=Path)
    export.set_defaults(run=_export)


def _inspect(args: argparse.Namespace) -> int:
    from megatron_fleet.data.inspection import as_json, describe, inspect

    found = inspect(_data(args.source, args.overrides), _progress)
    if args.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        say_lines(describe(found))
    return 2 if found.problems else 0


def _prepare(args: argparse.Namespace) -> int:
    from megatron_fleet.data.dataset import build
    from megatron_fleet.data.inspection import as_text, environments
    from megatron_fleet.data.source import write_prepared

    previous = [f"data.split_manifest={args.previous}"] if args.previous else []
    dataset = build(_data(args.source, [*args.overrides, *previous]), say=_progress)
    say_lines("\n".join([as_text(environments(dataset)), *dataset.split.notes]))
    _progress(f"writing {args.out}")
    written = write_prepared(args.out, dataset.split.train, dataset.split.held_out, dataset.manifest)
    say(f"{args.out}: {'written' if written else 'already exists with the same content'}; data.tasks={args.out}")
    return 0


def _from(args: argparse.Namespace) -> int:
    from megatron_fleet.data.questions import as_file, environment_of, make_rows, read_table

    if args.out.suffix != ".json":
        raise UserError(f"{args.out}: a JSON file is written; give it a name that ends with .json.")
    table = read_table(args.source, args.split, args.subset)
    environment = args.environment or environment_of(args.source)
    rows = make_rows(table, args.source, environment, args.prompt, args.answer, args.key)
    content = as_file(rows)
    if args.out.exists() and args.out.read_bytes() != content:
        raise UserError(f"{args.out}: another file is there already; name a new one or remove it.")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(content)
    repeated = f", {len(table) - len(rows)} repeated rows left out" if len(rows) < len(table) else ""
    say(f"{args.out}: {len(rows)} tasks of environment {environment}{repeated}; data.tasks={args.out}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from megatron_fleet.data.dataset import load_tasks
    from megatron_fleet.data.source import EMBEDDED, read_bytes

    if args.file.exists():
        raise UserError(f"{args.file} already exists; name another file or remove it.")
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_bytes(read_bytes(EMBEDDED))
    say(f"{args.file}: {len(load_tasks(args.file))} tasks")
    return 0


def _data(source: str, overrides: Sequence[str]) -> DataConfig:
    """Return the section ``data`` as a run would have it."""
    from megatron_fleet.config.load import load

    other = next((text for text in overrides if not text.lstrip("+").startswith(("data=", "data."))), None)
    if other is not None:
        raise UserError(f"Override '{other}': changes nothing here; write data=preset or data.key=value.")
    # The schema requires a model; any will do here.
    return load(["model=tiny", *overrides, f"data.tasks={source}"]).data


def _progress(what: str) -> None:
    say(f"mfleet: {what} …", sys.stderr)
