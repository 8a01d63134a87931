"""Command line of ``mfleet``. Heavy imports happen in the command that needs them."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_fleet import __version__
from megatron_fleet.analysis.runs_commands import add_commands as add_runs_commands
from megatron_fleet.analysis.trajectories_commands import add_arguments as add_trajectories_arguments
from megatron_fleet.config.errors import UserError, printable, say, say_lines
from megatron_fleet.config.secrets import find_processor
from megatron_fleet.convert.convert_commands import add_commands as add_convert_commands
from megatron_fleet.data.data_commands import add_commands as add_data_commands
from megatron_fleet.launch.launch_command import add_arguments as add_launch_arguments
from megatron_fleet.planning.plan_command import add_arguments as add_plan_arguments
from megatron_fleet.platform.processes import leave, private_files
from megatron_fleet.tuning import override_file
from megatron_fleet.tuning.tune_commands import add_commands as add_tune_commands

if TYPE_CHECKING:
    from megatron_fleet.cluster.inventory import Inventory
    from megatron_fleet.config.schema import Config

_UNUSABLE_PATH = {
    *(errno.EACCES, errno.EDQUOT, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT),
    *(errno.ENOSPC, errno.ENOTDIR, errno.ENXIO, errno.EPERM, errno.EROFS),
}
MAX_SHOWN = 4096
"""Characters of a file name in a message; Linux limits paths to this length."""
OVERRIDES_HELP = "group=option, section.key=value, or @FILE with one a line; docs/reference/config.md lists the keys"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``mfleet``.

    Returns:
        The exit status: 0 success, 2 user error, unusable paths included (one line says what to fix), 130 Ctrl-C, 1 any
        other failure (one line says where the traceback is) or a replay that differs.
    """
    args = _parse(argv)
    find_processor()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may contain an unpaired surrogate
    try:
        return args.run(args)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mfleet: stopped by Ctrl-C.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout went away (`mfleet config | head`); keeps the interpreter's final flush from failing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        where = _save_traceback(args)
        if isinstance(error, OSError) and error.filename is not None and error.errno in _UNUSABLE_PATH:
            said = f"{str(error.filename)[:MAX_SHOWN]}: {error.strerror}"
            said = f"error: {said}; name another path, or fix this one. (traceback in {where})"
            print(printable(said), file=sys.stderr)
            return 2
        said = f"error: {type(error).__name__}: {_first_line(error)} (traceback in {where})"
        print(printable(said), file=sys.stderr)
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes only the first run of positionals; overrides after an option are in `rest`.
    unknown = [text for text in rest if text.startswith("-") or not hasattr(args, "overrides")]
    if unknown:
        parser.error(f"unknown argument {unknown[0]}; `mfleet --help` and `mfleet train --help` list them")
    if rest:
        args.overrides.extend(rest)
    return args


class _Parser(argparse.ArgumentParser):
    """Parser that escapes its error messages, which quote untrusted arguments, and takes comments in files."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return override_file.arguments(arg_line)

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mfleet",
        description="Reinforcement learning of tool-using agents. @FILE stands for its lines as arguments.",
        fromfile_prefix_chars="@",
    )
    parser.add_argument("--version", action="version", version=f"megatron_fleet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    _add_run_commands(commands)
    _add_doctor(commands)
    evaluate = commands.add_parser("eval", help="evaluate a model without training; resumes an interrupted evaluation")
    evaluate.add_argument("--out", type=Path, metavar="DIR", help="folder of the outputs (default: runs/eval)")
    evaluate.add_argument("--checkpoint", metavar="PATH", help="a run's folder, or a checkpoint, instead of model.path")
    evaluate.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server, as https://host/v1")
    evaluate.add_argument("--model", metavar="NAME", help="its model; the key comes from OPENAI_API_KEY")
    evaluate.add_argument("--tasks", choices=("held-out", "all"), default="held-out", help="(default: %(default)s)")
    evaluate.add_argument("overrides", nargs="*", help=OVERRIDES_HELP)
    evaluate.set_defaults(run=_evaluate)

    plan = commands.add_parser("plan", help="memory, step time and cost of a run on GPUs that you do not have yet")
    add_plan_arguments(plan, OVERRIDES_HELP)

    config = commands.add_parser("config", help="print the resolved configuration")
    config.add_argument("--out", type=Path, metavar="DIR", help="short for run.out=DIR")
    config.add_argument("overrides", nargs="*", help=OVERRIDES_HELP)
    config.set_defaults(run=_config)

    data = commands.add_parser("data", help="task files: inspect, select and split them")
    add_data_commands(data)

    convert = commands.add_parser("convert", help="checkpoints: HF folders to Megatron's format and back")
    add_convert_commands(convert)

    report = commands.add_parser("report", help="write a report of a run as one HTML page and as Markdown")
    where = "a run's folder (run.out), its address in a store, or a folder of Fleet's evaluations; docs/run/report.md"
    report.add_argument("place", metavar="RUN", help=where)
    report.add_argument("--out", dest="page", type=Path, metavar="FILE", help="the page (default: RUN/report.html)")
    report.add_argument("--markdown", type=Path, metavar="FILE", help="the Markdown (default: RUN/report.md)")
    report.add_argument(
        "--serve", action="store_true", help="instead of writing files, serve a page that updates during the run"
    )
    report.add_argument(
        "--host", metavar="ADDRESS", help="address of the page with --serve (default: this machine only)"
    )
    report.add_argument("--port", type=int, help="port of the page with --serve (default: 8470; 0: any free one)")
    report.set_defaults(run=_report)

    top = commands.add_parser("top", help="watch a live run in the terminal: steps, engines, environments, alerts")
    top.add_argument("folder", type=Path, metavar="RUN", help="the folder that the run writes to (run.out)")
    top.add_argument("--once", action="store_true", help="print one frame")
    top.set_defaults(run=_top)

    add_trajectories_arguments(commands.add_parser("trajectories", help="find, print and export episodes of a run"))
    add_runs_commands(commands.add_parser("runs", help="runs in folders and buckets: list, show, diff, compare, prune"))

    debug = commands.add_parser("debug", help="examine failures").add_subparsers(required=True, metavar="command")
    replay = debug.add_parser("replay", help="replay a dumped optimizer step in isolation; status 0 if reproduced")
    replay.add_argument("--json", action="store_true", help="print everything as JSON")
    replay.add_argument("dump", type=Path, help="a folder below dumps/ of a run's outputs")
    replay.add_argument("overrides", nargs="*", help="section.key=value, as parallel.tensor=2 under torchrun")
    replay.set_defaults(run=_replay)

    measured = commands.add_parser("tune", help="measure settings on this machine")
    add_tune_commands(measured, OVERRIDES_HELP)

    model = commands.add_parser("model", help="models").add_subparsers(required=True, metavar="command")
    _add_model_commands(model)
    return parser


def _add_run_commands(commands: Any) -> None:
    train = commands.add_parser(
        "train", help="train a policy; starts the trainer's ranks unless cluster.ranks=external"
    )
    train.add_argument("--dry-run", action="store_true", help="check everything, print the plan, then stop")
    gpus = "with --dry-run: plan for N H100 of 80 GB on one host, regardless of this machine"
    train.add_argument("--gpus", type=int, metavar="N", help=gpus)
    train.add_argument("--out", type=Path, metavar="DIR", help="folder of the outputs (short for run.out=DIR)")
    train.add_argument("--resolved", type=Path, metavar="FILE", help="the config.json of a run, instead of overrides")
    train.add_argument("overrides", nargs="*", help=OVERRIDES_HELP)
    train.set_defaults(run=_train)
    launch = commands.add_parser("launch", help="submit a run to this machine or a cluster, follow or cancel it")
    add_launch_arguments(launch, OVERRIDES_HELP)
    launch.set_defaults(run=_launch)
    rank = commands.add_parser("rank", help="run one rank, under torchrun or srun; see docs/run/cluster.md")
    rank.set_defaults(run=_rank)
    node = commands.add_parser("node", help="run one host of a run with cluster.nodes; see docs/run/cluster.md")
    alone = "this host gets engines only; it may join and leave during the run (rollout.engine.replicas=auto)"
    node.add_argument("--rollout-only", action="store_true", help=alone)
    node.set_defaults(run=_node)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="probe this host, or all hosts, and the services of a run before it")
    text = "takes seconds: leave out the hashes of the model, the import of libraries, an engine and an environment"
    doctor.add_argument("--quick", action="store_true", help=text)
    doctor.add_argument("--json", action="store_true", help="print everything as JSON")
    text = "settings of the run to start; without any, only the machine is probed"
    doctor.add_argument("overrides", nargs="*", help=f"{text}; {OVERRIDES_HELP}")
    doctor.set_defaults(run=_doctor)


def _add_model_commands(model: Any) -> None:
    extend = model.add_parser("extend", help="make a model folder with a longer context, by YaRN")
    extend.add_argument("source", type=Path, help="HF folder of the model as it was trained; TARGET has links to it")
    extend.add_argument("target", type=Path, help="new folder, for model.path")
    extend.add_argument("--factor", type=float, required=True, help="factor by which the context becomes longer")
    trained = "what the model was trained on: 32768 for Qwen 3 (its config.json says 40960, answers included)"
    extend.add_argument("--original", type=int, required=True, metavar="TOKENS", help=trained)
    extend.set_defaults(run=_extend)
    fetch = model.add_parser(
        "fetch", help="download a model from the Hugging Face hub or a bucket, as a run does at its start"
    )
    fetch.add_argument(
        "model", metavar="ID", help="organisation/name, organisation/name@revision, or s3://… or gs://bucket/prefix"
    )
    fetch.set_defaults(run=_fetch)
    random = model.add_parser("make-random", help="make a folder with Qwen3-0.6B's shape and random weights (1.2 GB)")
    random.add_argument("target", type=Path, help="new folder, for model.path; its tokenizer is the embedded fleet's")
    random.set_defaults(run=_make_random)


def _train(args: argparse.Namespace) -> int:
    from megatron_fleet.loop import reused
    from megatron_fleet.loop.run_tasks import in_steps
    from megatron_fleet.preflight import checks
    from megatron_fleet.weights.fetch.cache import fetched

    config = _load(args)
    args.out = Path(config.run.out)
    config = fetched(config, weights=config.reads_weights and not args.dry_run)
    assumed = _assumed(args, config)
    if (held := reused.held_run(config)) is not None:
        say_lines(reused.describe(held, config))
    checks.check_training(config, assumed)
    config = in_steps(config)
    over = None if held is None else reused.finished(held, config)
    if args.dry_run:
        from megatron_fleet.loop.dry_run import describe

        say_lines(describe(config, assumed))
    if over is not None:
        say(over)
    if over is not None or args.dry_run:
        return 0
    from megatron_fleet.loop.main import main as train

    with private_files(args.out, config.run.shared):
        return train(config)


def _assumed(args: argparse.Namespace, config: Config) -> Inventory | None:
    from megatron_fleet.cluster.inventory import assumed_inventory
    from megatron_fleet.planning.hardware import gpu_of

    if args.gpus is None:
        return None
    if args.gpus < 1 or not args.dry_run:
        raise UserError(f"--gpus={args.gpus} plans for GPUs that you do not have yet; give 1 or more, with --dry-run.")
    gpu = gpu_of(config.cluster)
    return assumed_inventory(args.gpus, f"{gpu.name} (assumed)", gpu.memory)


def _launch(args: argparse.Namespace) -> int:
    from megatron_fleet.launch.launch_command import main as launch

    def check(config: Config) -> None:
        # Of other machines, only the configuration is known here, and the model if it lies on a common file system.
        from megatron_fleet.config import validate
        from megatron_fleet.preflight import checks
        from megatron_fleet.weights.fetch.cache import fetched
        from megatron_fleet.weights.model_check import check_model

        if config.launch.kind in ("local", "torchrun"):
            checks.check_training(fetched(config, weights=False))
            return
        validate.check(config)
        if Path(config.model.folder).is_dir():
            check_model(config.model, config.rollout.engine.speculative, tokenizer=False)

    return launch(args, os.environ, check)


def _doctor(args: argparse.Namespace) -> int:
    from megatron_fleet.config import validate
    from megatron_fleet.config.load import load
    from megatron_fleet.doctor.doctor_command import main as doctor

    config = load(args.overrides) if args.overrides else None
    if config is not None:
        validate.check(config)
    return doctor(config, os.environ, args.quick, args.json)


def _rank(args: argparse.Namespace) -> NoReturn:
    from megatron_fleet.trainer.rank import main as rank

    leave(rank(os.environ))


def _node(args: argparse.Namespace) -> int:
    from megatron_fleet.cluster.node_process import main as node

    return node(os.environ, args.rollout_only)


def _load(args: argparse.Namespace) -> Config:
    from megatron_fleet.config.load import load, load_resolved

    if args.resolved is None:
        return load(_overrides(args))
    if args.overrides or args.out:
        raise UserError("--resolved names a complete configuration; remove the overrides and --out.")
    return load_resolved(args.resolved)


def _overrides(args: argparse.Namespace) -> list[str]:
    return [*args.overrides, *([f"run.out={args.out}"] if args.out else [])]


def _evaluate(args: argparse.Namespace) -> int:
    from megatron_fleet.evaluation.eval_command import main as evaluate
    from megatron_fleet.evaluation.eval_command import read_config
    from megatron_fleet.weights.fetch.cache import fetched

    config, run = read_config(args.overrides, args.out, args.checkpoint, args.endpoint, args.model)
    args.out = Path(config.run.out)
    if config.eval.endpoint.url is None and args.checkpoint is None:
        config = fetched(config)
    signal.signal(
        signal.SIGTERM, lambda number, _frame: sys.exit(128 + number)
    )  # as an exception, so that started processes are closed
    with private_files(args.out, config.run.shared):
        return evaluate(config, args.checkpoint, run, args.tasks)


def _config(args: argparse.Namespace) -> int:
    from megatron_fleet.config.load import load
    from megatron_fleet.loop.dry_run import as_yaml

    print(as_yaml(load(_overrides(args))), end="")
    return 0


def _report(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis.report import write_report

    if args.serve:
        return _serve(args)
    if args.host is not None or args.port is not None:
        raise UserError("--host and --port are those of the page with --serve; add it, or leave them out.")
    say_lines(str(write_report(args.place, args.page, args.markdown)))
    return 0


def _serve(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis.live.server import HOST, PORT, serve

    if args.page or args.markdown:
        raise UserError("--serve writes no files; leave out --out and --markdown, or --serve.")
    if "://" in args.place:
        raise UserError(f"{args.place}: a page with --serve needs the folder that the run writes to (run.out).")
    serve(Path(args.place), HOST if args.host is None else args.host, PORT if args.port is None else args.port)
    return 0


def _top(args: argparse.Namespace) -> int:
    from megatron_fleet.analysis.top import main as top

    return top(args.folder, args.once)


def _replay(args: argparse.Namespace) -> int:
    from megatron_fleet.debug.replay import main as replay

    return replay(args.dump, args.overrides, args.json)


def _extend(args: argparse.Namespace) -> int:
    from megatron_fleet.weights.extend import extend

    context = extend(args.source, args.target, args.factor, args.original)
    say(f"{args.target}: {context} tokens; train with model.path={args.target} rollout.max_context={context}")
    return 0


def _fetch(args: argparse.Namespace) -> int:
    from megatron_fleet.config.remote_model import remote_model
    from megatron_fleet.config.sections.trainer import ModelConfig
    from megatron_fleet.weights.fetch.cache import fetch

    if remote_model(args.model) is None:
        raise UserError(
            f"{args.model} is neither a hub id nor an address in a bucket; write organisation/name[@revision], "
            f"s3://bucket/prefix or gs://bucket/prefix."
        )
    path = fetch(args.model)
    say(f"{path}: its files are in {ModelConfig(path=path).folder}; train with model.path={path}")
    return 0


def _make_random(args: argparse.Namespace) -> int:
    from megatron_fleet.weights.random_model import write_random

    say(f"{args.target}: {write_random(args.target):,} parameters; train with model.path={args.target}")
    return 0


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _save_traceback(args: argparse.Namespace) -> str:
    """Save the traceback and return its location: in the output folder, if the command has one, or a temporary file."""
    text, folder = traceback.format_exc(), getattr(args, "out", None)
    if isinstance(folder, Path):
        with contextlib.suppress(OSError):
            with private_files(folder, shared=False):
                folder.mkdir(exist_ok=True)
                (folder / "error.log").write_text(text, encoding="utf-8", errors="backslashreplace")
            return str(folder / "error.log")
    try:
        handle, name = tempfile.mkstemp(prefix="mfleet-error-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        say_lines(text, sys.stderr)
        return "stderr"
    return name


if __name__ == "__main__":
    sys.exit(main())
