"""Command-line interface of ``mfleet convert …``."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fleet.config.errors import UserError, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_fleet.convert.inspect import Contents, TensorLine
    from megatron_fleet.convert.plan import Plan

SHOWN_ARGS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_experts"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
)
"""Arguments of the writer's command line that `inspect` prints; its JSON output has all of them."""
SHOWN_DIFFERENCES = 10
EPILOG = (
    "Folders are local paths, s3://bucket/prefix or gs://bucket/prefix. docs/run/convert.md shows each command at work."
)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands to the parser of ``mfleet convert``."""
    commands = parser.add_subparsers(required=True, metavar="command")
    megatron = _command(
        commands, "to-megatron", "HF folder → Megatron torch_dist checkpoint for any layout", _to_megatron
    )
    megatron.add_argument("hf_dir", metavar="HF_DIR")
    megatron.add_argument("out", metavar="OUT", help="new folder; Megatron-LM loads it with --load OUT")
    megatron.add_argument(
        "--layer-keys",
        choices=("auto", "stacked", "numbered"),
        default="auto",
        help="Megatron's names of layers: numbered for models built with a list moe_layer_freq (default: auto, stacked "
        "when all layers are of one kind)",
    )
    _add_execution(megatron)
    hf = _command(commands, "to-hf", "Megatron torch_dist checkpoint → HF folder", _to_hf)
    hf.add_argument("checkpoint", metavar="CHECKPOINT")
    hf.add_argument("out", metavar="OUT", help="new folder")
    hf.add_argument(
        "--template",
        metavar="HF_DIR",
        help="the model's HF folder: its files' layout, types, tokenizer "
        "(default: what CHECKPOINT keeps of it, or the model that its run began with)",
    )
    hf.add_argument(
        "--dtype",
        choices=("template", "bfloat16", "float16", "float32", "fp8"),
        default="template",
        help="type of the weights (default: the template's, quantised as there); fp8: linear layers in E4M3 with a "
        "scale for each 128 x 128 block, as in DeepSeek's and Qwen's releases, the rest in bfloat16",
    )
    _add_execution(hf)
    inspect = _command(commands, "inspect", "what a folder holds, from its headers", _inspect)
    inspect.add_argument("path", metavar="PATH")
    inspect.add_argument("--json", action="store_true", help="JSON instead of a table")
    inspect.add_argument("--every", action="store_true", help="one line for each tensor, not for each kind")
    inspect.add_argument("--hashes", metavar="FILE", type=Path, help="read the weights and write a hash of each tensor")
    _add_template_and_workers(inspect)
    verify = _command(commands, "verify", "whether two folders hold the same weights", _verify)
    verify.add_argument("a", metavar="A", help="HF folder or checkpoint")
    verify.add_argument(
        "b", metavar="B", help="second folder to compare, or a file of hashes made by `inspect --hashes`"
    )
    verify.add_argument(
        "--tolerance",
        type=_distance,
        default=0.0,
        metavar="X",
        help="greatest difference allowed (default 0: bit for bit)",
    )
    _add_template_and_workers(verify)
    check = _command(commands, "check", "whether vLLM computes with an export what the trainer did", _check)
    check.add_argument("folder", metavar="HF_DIR", help="local folder")
    check.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="checkpoint from which it was exported (of a run with checkpoint.export.check=true), or its .probe.json",
    )
    check.add_argument(
        "--tolerance",
        type=_distance,
        default=0.1,
        metavar="X",
        help="greatest mean difference of log-probs allowed, in nats (default 0.1)",
    )
    check.add_argument("--tensor-parallel", type=_positive, default=1, metavar="N", help="GPUs of the engine")
    check.add_argument("--write", metavar="FILE", type=Path, help="also write the result as JSON")


def _command(
    commands: argparse._SubParsersAction, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EPILOG)
    parser.add_argument("--family", metavar="MODULE:NAME", help="model family of your own, as for model.family")

    def run_with_family(args: argparse.Namespace) -> int:
        from megatron_fleet.models.registry import use_family

        use_family(args.family)
        return run(args)

    parser.set_defaults(run=run_with_family)
    return parser


def _add_execution(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=_positive, default=_cores(), metavar="N", help="threads (default: the cores)")
    parser.add_argument(
        "--shard",
        default="1/1",
        metavar="I/N",
        help="do part I of N, with the others on other machines; the last to finish completes the folder",
    )
    parser.add_argument("--plan", action="store_true", help="check everything, print what would be written, then stop")


def _add_template_and_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--template", metavar="HF_DIR", help="the model's HF folder, for a checkpoint that does not name it"
    )
    parser.add_argument("--workers", type=_positive, default=_cores(), metavar="N", help="threads (default: the cores)")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _distance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _to_megatron(args: argparse.Namespace) -> int:
    from megatron_fleet.convert.to_megatron import plan_to_megatron
    from megatron_fleet.weights.model_check import open_checked

    gc.disable()  # see _to_hf
    numbered = {"auto": None, "stacked": False, "numbered": True}[args.layer_keys]
    return _run(plan_to_megatron(open_checked(args.hf_dir, whole=not args.plan), numbered), args)


def _to_hf(args: argparse.Namespace) -> int:
    from megatron_fleet.convert.to_hf import DTYPE_NAMES, FP8, plan_to_hf

    # A plan is up to a million small long-lived objects: scanning them for cycles takes as long as creating them.
    gc.disable()
    dtype = {name: stored for stored, name in (*DTYPE_NAMES.items(), (FP8, "fp8"))}.get(args.dtype)
    return _run(plan_to_hf(args.checkpoint, args.template, dtype), args)


def _run(plan: Plan, args: argparse.Namespace) -> int:
    from megatron_fleet.convert.execute import Share, execute, is_complete
    from megatron_fleet.storage.open import open_staging
    from megatron_fleet.storage.progress import ProgressLine

    share = Share.parse(args.shard)
    if args.plan:
        done = is_complete(open_staging(args.out, plan.marker), plan)
        pieces = sum(len(file.contents) for file in plan.files)
        size = f"{len(plan.files)} files, {plan.nbytes / 1e9:.2f} GB in {pieces} pieces"
        say(f"{plan.source} → {args.out}: {size}{', complete already' if done else ''}")
        return 0
    with ProgressLine() as progress:
        complete = execute(plan, args.out, args.workers, share, progress)
    say(f"{args.out}: {'complete' if complete else 'this part is done, other parts are not'}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from megatron_fleet.convert.inspect import inspect

    if args.hashes:
        return _write_hashes(args)
    contents = inspect(args.path, args.every)
    if args.json:
        print(json.dumps(contents.as_json(), indent=2))
    else:
        _print_tree(contents)
    return 0


def _print_tree(contents: Contents) -> None:
    _print_rows(contents.rows)
    if contents.passthrough:
        say("kept for the way back, in hf/")
        _print_rows(contents.passthrough)
    facts = [contents.kind, f"{contents.tensors} tensors"]
    facts += [f"{contents.objects} objects"] if contents.objects else []
    facts += [f"{contents.optimizer} optimizer entries"] if contents.optimizer else []
    facts += [_size(contents.nbytes)]
    iteration = contents.common.get("iteration")
    facts += [f"iteration {iteration}"] if isinstance(iteration, int) else []
    say(f"{contents.url}: {', '.join(facts)}")
    written = contents.common.get("args")
    known = written if isinstance(written, dict) else {}
    shown = ", ".join(f"{name}={known[name]!r:.100}" for name in SHOWN_ARGS if name in known)
    if shown:
        say(f"written by Megatron-LM with {shown}")


def _print_rows(rows: Sequence[TensorLine]) -> None:
    from megatron_fleet.convert.inspect import tree

    lines = list(tree(rows))
    width = max((2 * depth + len(label) for depth, label, _ in lines), default=0)
    for depth, label, row in lines:
        text = f"{'  ' * depth}{label}".ljust(width)
        if row is not None:
            times = f"× {row.count}" if row.count > 1 else ""
            form = "" if row.form == "weight" else row.form
            shape = "×".join(map(str, row.shape)) or "scalar"
            text += f"  {row.dtype:8} {shape:>16} {times:>8} {'' if row.is_alias else _size(row.nbytes):>10}  {form}"
        say(text.rstrip())


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _write_hashes(args: argparse.Namespace) -> int:
    from megatron_fleet.convert.verify import hashes, open_side
    from megatron_fleet.storage.progress import ProgressLine

    side = open_side(args.path, args.template)
    try:
        file = args.hashes.open("x", encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{args.hashes} already exists; name another file or remove it.") from None
    except OSError as e:
        raise UserError(f"{args.hashes} cannot be written ({e.strerror}); name another file.") from None
    try:
        with file, ProgressLine() as progress:
            progress.start(args.path, side.nbytes)
            found = hashes(side, args.workers, progress.advance)
            json.dump({"path": args.path, "blake3": found}, file, indent=2)
    except BaseException:
        args.hashes.unlink(missing_ok=True)
        raise
    say(f"{args.hashes}: {len(found)} tensors")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from megatron_fleet.convert.verify import compare, compare_hashes, hashes, open_side, read_hashes
    from megatron_fleet.storage.progress import ProgressLine

    a = open_side(args.a, args.template)
    with ProgressLine() as progress:
        if args.b.endswith(".json"):
            expected = read_hashes(Path(args.b))
            progress.start(args.a, a.nbytes)
            differences = compare_hashes(hashes(a, args.workers, progress.advance), expected)
        else:
            b = open_side(args.b, args.template)
            progress.start(args.a, a.nbytes)
            differences = compare(a, b, args.tolerance, args.workers, progress.advance)
    for difference in differences[:SHOWN_DIFFERENCES]:
        say(str(difference))
    if differences:
        say(f"{len(differences)} of {len(a.names)} tensors differ between {args.a} and {args.b}")
        return 1
    say(f"{len(a.names)} tensors are equal in {args.a} and {args.b}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from megatron_fleet.convert.check import compare, read_probe, scores_in_vllm

    folder, probe = Path(args.folder), read_probe(args.checkpoint)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; give a local HF folder.")
    result = compare(probe, scores_in_vllm(folder, probe.tokens, args.tensor_parallel))
    if args.write:
        result.write(args.write)
    good = result.mean <= args.tolerance
    remark = "" if good else f"; more than {args.tolerance:g}: it is not the model that was trained"
    say(
        f"{folder}: vLLM's log-probs of {result.tokens} tokens differ by {result.mean:.3g} nats on average from the "
        f"trainer's at step {result.step}, by {result.largest:.3g} at most{remark}"
    )
    return 0 if good else 1
