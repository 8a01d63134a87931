"""Comparison of a replayed optimizer step with its record, as a table or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_fleet.debug.record import json_number

SHOWN_MICRO_BATCHES, SHOWN_NAMES = 24, 3
"""Micro-batches in a table, beyond which only those with a note are shown, and maximum length of a list of names."""


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
    """Whether both are finite and close, or neither is finite: NaN or inf may depend on the order of a sum."""
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


def shorten(names: Sequence[str]) -> str:
    """Join the first names, followed by the number of the others."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
