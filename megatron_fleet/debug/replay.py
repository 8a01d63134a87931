"""``mfleet debug replay``: the forward and backward pass of a dumped optimizer step, repeated in isolation."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.config.errors import UserError, say
from megatron_fleet.config.load import load_resolved
from megatron_fleet.config.schema import Config, ParallelConfig
from megatron_fleet.debug.dumps import Dump, open_dump
from megatron_fleet.debug.report import Found, MicroBatchFound, SequenceFound, to_json, to_text
from megatron_fleet.trainer.base import AdamParams, LossSpec, MicroBatchLoss, Trainer, TrainerLost

OpenTrainer = Callable[[Config], AbstractAsyncContextManager[Trainer]]
"""Opens a trainer whose weights are left to `Trainer.load_state`."""

SAME_ORDER = 1e-6
"""Relative tolerance in the same layout on CPU, where sums are computed in the same order."""
OTHER_ORDER = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative tolerance by `model.dtype` in another layout or on a GPU."""


def main(folder: Path, overrides: Sequence[str], as_json: bool) -> int:
    """Replay the dump in ``folder`` and print the result.

    Starts ranks on this machine: one, or those of the layout given by ``overrides`` of ``parallel``.

    Returns:
        0 when the step was reproduced, else 1.

    Raises:
        UserError: the dump cannot be read, the layout does not fit, or a rank died.
    """
    dump = open_dump(folder)
    Checkpoint(folder, dump.record.step).verify()
    outputs = Path(tempfile.mkdtemp(prefix="mfleet-replay-"))
    try:
        config, same_layout = _configure(dump, outputs, overrides)
        with _elapsed():
            found = asyncio.run(replay(dump, config, same_layout, _open_ranks))
    except TrainerLost as error:
        raise UserError(f"{folder}: the replay failed, {error}.") from None  # the message names a log in `outputs`
    except BaseException:
        shutil.rmtree(outputs)
        raise
    shutil.rmtree(outputs)
    say(to_json(found) if as_json else to_text(found))
    return 1 if found.differences() else 0


def _configure(dump: Dump, outputs: Path, overrides: Sequence[str]) -> tuple[Config, bool]:
    """The configuration of the replay, and whether its layout is that of the run."""
    recorded = load_resolved(dump.config_file)
    # The state of a run with adapters has only the adapters: the frozen weights come from the model of the run.
    model = recorded.model.path if recorded.policy.lora.rank else str(dump.model.absolute())
    fixed = [f"model.path={model}", f"run.out={outputs}", "cluster.ranks=local", "cluster.nodes=0"]
    config = load_resolved(dump.config_file, [*fixed, *overrides])
    if not any(text.startswith("parallel.") for text in overrides):
        config = config.model_copy(update={"parallel": ParallelConfig()})
    return config, config.parallel == recorded.parallel


def _open_ranks(config: Config) -> AbstractAsyncContextManager[Trainer]:
    from megatron_fleet.trainer.start import open_trainer

    return open_trainer(config, init="none")


async def replay(dump: Dump, config: Config, same_layout: bool, open_trainer: OpenTrainer) -> Found:
    """Load the state, run forward and backward over the data, and examine the gradients.

    Args:
        config: of the replay; its ``model.path`` needs ``config.json`` only, except with adapters.
        same_layout: whether it is the layout of the run.
    """
    record, data = dump.record, dump.data()
    async with open_trainer(config) as trainer:
        await trainer.load_state(dump.state)
        report = await trainer.forward_backward(data, LossSpec.of(config.algorithm, per_sequence=True))
        # No norm is below this bound, so the step is always held.
        step = await trainer.optim_step(AdamParams.of(config.policy.optimizer, record.lr), hold_above=-1.0)
        seen = await trainer.examine()
        device = trainer.info.device
    assert report.sequence_losses is not None, "they were asked for"
    same_order = same_layout and device == record.device == "cpu"
    # A trainer without micro-batches recorded none: compare the whole update.
    recorded = record.micro_batches or [MicroBatchLoss(list(range(len(data))), record.loss)]
    return Found(
        dump=str(dump.path),
        verdict=record.verdict,
        same_layout=same_layout,
        tolerance=SAME_ORDER if same_order else OTHER_ORDER[config.model.dtype],
        loss=(record.loss, report.loss),
        grad_norm=(record.grad_norm, step.grad_norm),
        weights=(record.weights, seen.weights),
        gradients=(record.gradients, seen.gradients),
        parameters=seen.parameters,
        micro_batches=[_micro_batch(then, data, report.sequence_losses) for then in recorded],
    )


def _micro_batch(recorded: MicroBatchLoss, data: Sequence[Datum], losses: Sequence[float]) -> MicroBatchFound:
    sequences = [SequenceFound(i, len(data[i]), losses[i], not_finite(data[i])) for i in recorded.sequences]
    # A loss is a plain sum, and a sequence is in one micro-batch, so this holds in any layout.
    return MicroBatchFound(recorded.loss, sum(sequence.loss for sequence in sequences), sequences)


def not_finite(datum: Datum) -> list[str]:
    """Fields with a non-finite value at a trained token."""
    values = {f.name: getattr(datum, f.name) for f in fields(datum)}
    arrays = {name: a for name, a in values.items() if isinstance(a, np.ndarray) and a.dtype.kind == "f"}
    return [name for name, array in arrays.items() if not np.isfinite(array[datum.loss_mask]).all()]


@contextmanager
def _elapsed() -> Iterator[None]:
    """Show a spinner and the elapsed time on a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("replaying"), TimeElapsedColumn())
    shown = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as bar:
        bar.add_task("", total=None)
        yield
