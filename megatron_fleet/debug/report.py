"""What a replayed optimizer step gave, beside what was recorded: the comparison, a table, JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megatron_fleet.debug.dumps import json_number

SHOWN_ROWS, SHOWN_NAMES = 24, 3
"""A longer table has only the rows with something to tell; a longer list of names is cut."""


@dataclass(frozen=True, slots=True)
class SequenceFound:
    """One sequence of a row.

    Attributes:
        fields: of its Datum, those with a value that is not finite at a trained token.
    """

    tokens: int
    loss: float
    fields: list[str]


@dataclass(frozen=True, slots=True)
class RowFound:
    """One row: its loss as recorded and now."""

    data_rank: int
    row: int
    recorded: float
    loss: float
    sequences: list[SequenceFound]


@dataclass(frozen=True, slots=True)
class Found:
    """What a replay found, equal on every rank. Pairs are (recorded, now).

    Attributes:
        tolerance: relative; losses are measured against the mean absolute loss of a row.
        weights, gradients: names of parameters that are not finite, see `Faults`.
        parameters: all that the model has.
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
    rows: list[RowFound]

    def row_agrees(self, row: RowFound) -> bool:
        """The loss of a row is what it was."""
        return _agree(row.recorded, row.loss, self.tolerance * self._loss_scale())

    def differences(self) -> list[str]:
        """What is not as it was recorded, in words; empty when the step was reproduced."""
        out = []
        if not _agree(*self.grad_norm, self.tolerance * abs(self.grad_norm[0])):
            out.append("the gradient norm")
        if not _agree(*self.loss, self.tolerance * self._loss_scale() * max(1, len(self.rows))):
            out.append("the loss")
        if wrong := sum(not self.row_agrees(row) for row in self.rows):
            out.append(f"the losses of {wrong} of {len(self.rows)} rows")
        for name, (then, now) in (("weights", self.weights), ("gradients", self.gradients)):
            if set(then) != set(now):
                out.append(f"which {name} are not finite")
        return out

    def _loss_scale(self) -> float:
        finite = [abs(row.recorded) for row in self.rows if math.isfinite(row.recorded)]
        return sum(finite) / len(finite) if finite else 0.0


def _agree(then: float, now: float, difference: float) -> bool:
    """Both are finite and close, or neither is: which of nan and inf comes out may depend on the order of a sum."""
    if math.isfinite(then) and math.isfinite(now):
        return abs(then - now) <= difference
    return math.isfinite(then) == math.isfinite(now)


def to_json(found: Found) -> str:
    """Everything as one JSON object; numbers that are not finite are text."""
    content = asdict(found) | {"reproduced": not found.differences(), "differences": found.differences()}
    return json.dumps(json_number(content), indent=2)


def to_text(found: Found) -> str:
    """A table of the rows, and sentences."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"rows of {found.dump}")
    for column in ("data rank.row", "sequences", "tokens", "loss recorded", "loss now", "note"):
        table.add_column(column, justify="left" if column == "note" else "right")
    telling = [row for row in found.rows if len(found.rows) <= SHOWN_ROWS or _note(found, row)]
    for row in telling[:SHOWN_ROWS]:
        tokens = sum(s.tokens for s in row.sequences)
        numbers = (f"{row.data_rank}.{row.row}", len(row.sequences), tokens, _short(row.recorded), _short(row.loss))
        table.add_row(*map(str, numbers), _note(found, row))
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(table)
    hidden = len(found.rows) - min(len(telling), SHOWN_ROWS)
    lines = [captured.get().rstrip(), *([f"{hidden} more rows, in --json"] if hidden else []), *_sentences(found)]
    return "\n".join(lines)


def _note(found: Found, row: RowFound) -> str:
    parts = [] if found.row_agrees(row) else ["differs"]
    for index, sequence in enumerate(row.sequences):
        if sequence.fields:
            parts.append(f"sequence {index}: {', '.join(sequence.fields)} not finite")
        elif not math.isfinite(sequence.loss):
            parts.append(f"sequence {index}: loss not finite")
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
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more
