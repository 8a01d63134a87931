"""``mfleet debug replay``: the forward and backward pass of a dumped optimizer step, repeated in isolation."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.config.errors import UserError, say_lines
from megatron_fleet.config.load import load_resolved
from megatron_fleet.config.schema import Config, ParallelConfig
from megatron_fleet.debug.dumps import Dump, json_number, open_dump, shorten
from megatron_fleet.trainer.base import AdamParams, LossSpec, MicroBatchLoss, Trainer, TrainerLost

OpenTrainer = Callable[[Config], AbstractAsyncContextManager[Trainer]]
"""Opens a trainer whose weights are left to `Trainer.load_state`."""

SAME_ORDER = 1e-6
"""Relative tolerance in the same layout on CPU, where sums are computed in the same order."""
OTHER_ORDER = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative tolerance by `model.dtype` in another layout or on a GPU."""
SHOWN_MICRO_BATCHES = 24
"""Micro-batches in a table, beyond which only those with a note are shown."""


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
    say_lines(to_json(found) if as_json else to_text(found))
    return 1 if found.differences() else 0


def _configure(dump: Dump, outputs: Path, overrides: Sequence[str]) -> tuple[Config, bool]:
    """The configuration of the replay, and whether its layout is that of the run."""
    recorded = load_resolved(dump.config_file)
    # The state of a run with adapters has only the adapters: the frozen weights come from the model of the run.
    model = recorded.model.folder if recorded.policy.lora.rank else str(dump.model.absolute())
    fixed = [f"model.path={model}", f"run.out={outputs}", "cluster.ranks=local", "cluster.nodes=0"]
    config = load_resolved(dump.config_file, [*fixed, *overrides])
    if not any(text.startswith("parallel.") for text in overrides):
        config = config.model_copy(update={"parallel": ParallelConfig()})
    return config, config.parallel == recorded.parallel


def _open_ranks(config: Config) -> AbstractAsyncContextManager[Trainer]:
    from megatron_fleet.trainer.group import open_trainer

    return open_trainer(config, init="none")


async def replay(dump: Dump, config: Config, same_layout: bool, open_trainer: OpenTrainer) -> Found:
    """Load the state, run forward and backward over the data, and examine the gradients.

    Args:
        config: of the replay; its ``model.path`` needs ``config.json`` only, except with adapters.
        same_layout: whether it is the layout of the run.
    """
    record, data = dump.record, dump.data()
    async with open_trainer(config) as trainer:
        ranks = trainer.ranks
        assert ranks is not None  # only those of a trainer with ranks are dumped
        await trainer.load_state(dump.state)
        report = await trainer.forward_backward(data, LossSpec.of(config.algorithm, per_sequence=True))
        # No norm is below this bound, so the step is always held.
        step = await ranks.optim_step(AdamParams.of(config.policy.optimizer, record.lr), hold_above=-1.0)
        seen = await ranks.examine()
        device = ranks.info.device
    assert report.sequence_losses is not None and step.grad_norm is not None, "they were asked for, and ranks know it"
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
    """Names of the values that are not finite at a trained token."""
    arrays = {
        "loss_scale": np.full(len(datum), datum.loss_scale),
        "scaled_advantages": datum.scaled_advantages,
        "behaviour_logprobs": datum.behaviour_logprobs,
        **datum.arrays,
    }
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


@dataclass(frozen=True, slots=True)
class SequenceFound:
    """Result for one sequence, by its index in the data of the update.

    Attributes:
        fields: fields of its Datum with a non-finite value at a trained token.
    """

    index: int
    tokens: int
    loss: float
    fields: list[str]


@dataclass(frozen=True, slots=True)
class MicroBatchFound:
    """Result for one micro-batch of the run: its recorded and its replayed loss."""

    recorded: float
    loss: float
    sequences: list[SequenceFound]


@dataclass(frozen=True, slots=True)
class Found:
    """Findings of a replay. Pairs are (recorded, now).

    Attributes:
        tolerance: relative; losses are measured against the sum of the absolute losses of the sequences in a
            micro-batch.
        weights, gradients, parameters: see `trainer.base.Examination`.
    """

    dump: str
    verdict: str
    same_layout: bool
    tolerance: float
    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    weights: tuple[list[str], list[str]]
    gradients: tuple[list[str], list[str]]
    parameters: int
    micro_batches: list[MicroBatchFound]

    def agrees(self, micro_batch: MicroBatchFound) -> bool:
        """Whether the replayed loss of a micro-batch matches the recorded one."""
        return _agree(micro_batch.recorded, micro_batch.loss, self.tolerance * self._loss_scale())

    def differences(self) -> list[str]:
        """Describe the differences from the record; empty when the step was reproduced."""
        out, number = [], len(self.micro_batches)
        if not _agree(*self.grad_norm, self.tolerance * abs(self.grad_norm[0])):
            out.append("the gradient norm")
        if not _agree(*self.loss, self.tolerance * self._loss_scale() * max(1, number)):
            out.append("the loss")
        if wrong := sum(not self.agrees(micro_batch) for micro_batch in self.micro_batches):
            out.append(f"the losses of {wrong} of {number} micro-batches")
        for name, (then, now) in (("weights", self.weights), ("gradients", self.gradients)):
            if set(then) != set(now):
                out.append(f"which {name} are not finite")
        return out

    def _loss_scale(self) -> float:
        """Mean over micro-batches. Losses of sequences cancel in a sum, but their rounding errors do not."""
        sums = [sum(abs(s.loss) for s in m.sequences if math.isfinite(s.loss)) for m in self.micro_batches]
        return sum(sums) / len(sums) if sums else 0.0


def _agree(then: float, now: float, difference: float) -> bool:
    """Return whether both are finite and close, or neither is finite: NaN or inf may depend on the order of a sum."""
    if math.isfinite(then) and math.isfinite(now):
        return abs(then - now) <= difference
    return math.isfinite(then) == math.isfinite(now)


def to_json(found: Found) -> str:
    """Findings as one JSON object; non-finite numbers are text."""
    content = asdict(found) | {"reproduced": not found.differences(), "differences": found.differences()}
    return json.dumps(json_number(content), indent=2)


def to_text(found: Found) -> str:
    """Findings as a table of the micro-batches, with explanatory sentences."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"micro-batches of {found.dump}")
    for column in ("sequences", "tokens", "loss recorded", "loss now", "note"):
        table.add_column(column, justify="left" if column == "note" else "right")
    number = len(found.micro_batches)
    noted = [m for m in found.micro_batches if number <= SHOWN_MICRO_BATCHES or _note(found, m)]
    for micro_batch in noted[:SHOWN_MICRO_BATCHES]:
        names = shorten([str(s.index) for s in micro_batch.sequences])
        tokens = sum(s.tokens for s in micro_batch.sequences)
        numbers = (names, str(tokens), _short(micro_batch.recorded), _short(micro_batch.loss))
        table.add_row(*numbers, _note(found, micro_batch))
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(table)
    hidden = number - min(len(noted), SHOWN_MICRO_BATCHES)
    more = [f"{hidden} more micro-batches, in --json"] if hidden else []
    return "\n".join([captured.get().rstrip(), *more, *_sentences(found)])


def _note(found: Found, micro_batch: MicroBatchFound) -> str:
    parts = [] if found.agrees(micro_batch) else ["differs"]
    for sequence in micro_batch.sequences:
        if sequence.fields:
            parts.append(f"sequence {sequence.index}: {', '.join(sequence.fields)} not finite")
        elif not math.isfinite(sequence.loss):
            parts.append(f"sequence {sequence.index}: loss not finite")
    return "; ".join(parts)


def _sentences(found: Found) -> list[str]:
    def pair(name: str, values: tuple[float, float]) -> str:
        return f"{name} {_short(values[1])} (recorded {_short(values[0])})"

    lines = [f"{pair('gradient norm', found.grad_norm)}, {pair('loss', found.loss)}; verdict then: {found.verdict}"]
    if found.weights[1]:
        lines.append(f"weights that are not finite: {shorten(found.weights[1])}")
    if found.gradients[1]:
        count = f"{len(found.gradients[1])} of {found.parameters}"
        lines.append(f"gradients that are not finite: {count}, from the output on: {shorten(found.gradients[1])}")
    layout = "the layout of the run" if found.same_layout else "another layout than the run's"
    if differences := found.differences():
        lines.append(f"not reproduced in {layout} (tolerance {found.tolerance:g}): {', '.join(differences)}")
    else:
        lines.append(f"reproduced in {layout} (tolerance {found.tolerance:g})")
    return lines


def _short(value: float) -> str:
    return f"{value:.7g}"
