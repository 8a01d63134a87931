"""Command-line interface of ``mfleet tune …``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fleet.config.errors import UserError

if TYPE_CHECKING:
    from megatron_fleet.config.schema import Config


def add_commands(parser: argparse.ArgumentParser, overrides_help: str) -> None:
    """Add the subcommands to the parser of ``mfleet tune``."""
    commands = parser.add_subparsers(required=True, metavar="command")
    precision = commands.add_parser("precision", help="measure speed and accuracy of each precision")
    _add_layers(precision)
    precision.set_defaults(run=_precision)
    trainer = commands.add_parser("trainer", help="measure micro-batch sizes, recomputation and chunks of log-probs")
    _add_layers(trainer)
    text = "try this micro-batch; repeatable (default: 1, 2 and 4 times rollout.max_context)"
    trainer.add_argument("--micro-batch", type=int, action="append", default=[], metavar="TOKENS", help=text)
    text = "try this value of policy.recompute; repeatable (default: none and full)"
    trainer.add_argument("--recompute", action="append", default=[], metavar="VALUE", help=text)
    text = "try this policy.logprob_chunk; repeatable (default: 1024, 4096 and 16384)"
    trainer.add_argument("--chunk", type=int, action="append", default=[], metavar="TOKENS", help=text)
    trainer.set_defaults(run=_trainer)
    engine = commands.add_parser("engine", help="measure settings of the rollout engines")
    text = "try this setting; repeatable (default: sequences and tokens in a batch, CUDA graphs, FP8)"
    engine.add_argument("--try", dest="asked", action="append", default=[], metavar="KEY=VALUE", help=text)
    text = "sequences at once (default: those of one replica, by rollout.episodes_in_flight)"
    engine.add_argument("--sequences", type=int, metavar="N", help=text)
    engine.add_argument("--prompt", type=int, metavar="TOKENS", help="length of a prompt (default: at most 2048)")
    engine.add_argument("--answer", type=int, metavar="TOKENS", help="tokens to sample (default: those of one turn)")
    engine.add_argument("--repeats", type=int, default=3, help="timed rounds (default: %(default)s)")
    engine.set_defaults(run=_engine)
    for command in (precision, trainer, engine):
        command.add_argument("--json", action="store_true", help="print everything as JSON")
        text = "write the choice into this file, which every command takes as @FILE; its other keys stay"
        command.add_argument("--write", type=Path, metavar="FILE", help=text)
        command.add_argument("overrides", nargs="*", help=overrides_help)


def _add_layers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=2, help="layers of the model to build (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps per turn (default: %(default)s)")


def _check_positive(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')}={value} must be at least 1.")


def _compose(args: argparse.Namespace, settings: Sequence[str] = ()) -> Config:
    """Compose the configuration from the command's overrides and further settings. Raises UserError."""
    from megatron_fleet.config.load import load

    return load([*args.overrides, *settings])


def _checked(args: argparse.Namespace) -> Config:
    from megatron_fleet.config import validate
    from megatron_fleet.weights.fetch.cache import fetched

    config = _compose(args)
    validate.check(config)
    return fetched(config)


def _precision(args: argparse.Namespace) -> int:
    from megatron_fleet.tuning.tune_precision import main

    _check_positive(args, "layers", "repeats")
    return main(_checked(args), args.layers, args.repeats, args.json, args.write)


def _trainer(args: argparse.Namespace) -> int:
    from megatron_fleet.tuning.tune_trainer import Choices, main

    _check_positive(args, "layers", "repeats", "micro_batch", "chunk")
    choices = Choices.of(_checked(args), args.micro_batch, args.recompute, args.chunk)
    return main(lambda settings: _compose(args, settings), choices, args.layers, args.repeats, args.json, args.write)


def _engine(args: argparse.Namespace) -> int:
    from megatron_fleet.tuning.tune_engine import Load, main

    _check_positive(args, "repeats", "sequences", "prompt", "answer")
    load = Load.of(_checked(args).rollout, args.sequences, args.prompt, args.answer)
    return main(lambda settings: _compose(args, settings), load, args.asked, args.repeats, args.json, args.write)
