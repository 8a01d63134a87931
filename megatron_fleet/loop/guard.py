"""The guarded optimizer step: what looks wrong is told, counted and kept for replay before anything is changed."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.debug.dumps import Dumps, Record, gather_row_losses
from megatron_fleet.debug.report import shorten
from megatron_fleet.loop.safety import StepJudge, Verdict
from megatron_fleet.platform.communicator import Communicator
from megatron_fleet.platform.device import device
from megatron_fleet.trainer.base import LossReport, OptimReport, Rows
from megatron_fleet.trainer.megatron.faults import find_faults
from megatron_fleet.trainer.megatron.policy import MegatronPolicy
from megatron_fleet.trainer.row_losses import RowLosses

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer step whose gradients are there: number ``part`` (from 0) of training step ``step`` (from 1).

    Attributes:
        rows: this rank's.
        losses: what `Policy.forward_backward` was given.
        report: what it answered.
    """

    step: int
    part: int
    lr: float
    rows: Rows
    losses: RowLosses
    report: LossReport


class StepGuard:
    """Takes optimizer steps. Every method but the properties is collective."""

    def __init__(self, config: Config, policy: MegatronPolicy, world: Communicator) -> None:
        self._config, self._policy, self._world = config, policy, world
        safety = config.policy.safety
        self._judge = StepJudge(safety)
        self._limit = safety.max_skipped_in_a_row
        self._dumps = Dumps(Path(config.run.out) / "dumps", safety.max_dumps, world)
        self._last = ""

    @property
    def stuck(self) -> bool:
        """Too many steps in a row were skipped."""
        return self._judge.skipped_in_a_row >= self._limit

    def stop_if_stuck(self) -> None:
        """Raises UserError when too many steps in a row were skipped. Save a checkpoint before."""
        if self.stuck:
            raise UserError(
                f"{self._judge.skipped_in_a_row} updates in a row were skipped because loss or gradient was not finite "
                f"(policy.safety.max_skipped_in_a_row={self._limit}; the last: {self._last}); the newest checkpoint "
                f"has the state before them: find the cause, or lower policy.optimizer.lr and go on from an older one."
            )

    def state(self) -> dict[str, Any]:
        """For the checkpoint; JSON-able. A run that stopped begins to count anew."""
        return self._judge.state() | ({"skipped_in_a_row": 0} if self.stuck else {})

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._judge.load(state)

    def optim_step(self, update: Update) -> OptimReport:
        """`Policy.optim_step`, with a look at loss and gradient norm before anything is changed."""
        verdict = Verdict.FINE

        def inspect(norm: float) -> bool:
            nonlocal verdict
            verdict = self._judge.judge(update.report.loss, norm)
            if verdict is not Verdict.FINE:
                self._examine(update, norm, verdict)
            return verdict is not Verdict.NOT_FINITE

        report = self._policy.optim_step(update.lr, inspect)
        self._judge.record(report.grad_norm, report.skipped)
        return replace(report, spike=verdict is Verdict.SPIKE, skipped_total=self._judge.skipped)

    def _examine(self, update: Update, norm: float, verdict: Verdict) -> None:
        faults = find_faults(self._policy.model_chunks)
        record = Record(
            step=update.step,
            part=update.part,
            verdict=verdict.value,
            device=device().type,
            lr=update.lr,
            loss=update.report.loss,
            grad_norm=norm,
            median=self._judge.median,
            row_losses=gather_row_losses(self._policy, update.losses.values()[: len(update.rows)], self._world),
            weights=faults.weights,
            gradients=faults.gradients,
            parameters=faults.parameters,
        )
        self._last = describe(record)
        where = self._keep(update, record) if self._dumps.room(verdict) else ""
        if self._world.rank == 0:
            log.warning("step %d: %s%s", update.step, self._last, where)

    def _keep(self, update: Update, record: Record) -> str:
        """Write a dump; what became of it, in words. A dump that fails does not end the run."""
        try:
            path = self._dumps.save(self._config, self._policy, update.rows, record)
        except Exception as error:
            return f" (it could not be kept for replay: {error})"
        return f"; look into it with `mfleet debug replay {path}`"


def describe(record: Record) -> str:
    """What is wrong with a step, in one line."""
    if record.verdict == Verdict.SPIKE:
        ratio = record.grad_norm / record.median
        return f"gradient norm {record.grad_norm:.3g} is {ratio:.1f} × the median of the last ones"
    parts = [f"loss {record.loss:.3g}, gradient norm {record.grad_norm:.3g}, so the update was skipped"]
    if record.weights:
        parts.append(f"weights are not finite: {shorten(record.weights)}")
    bad = [f"{r}.{i}" for r, rank in enumerate(record.row_losses) for i, x in enumerate(rank) if not math.isfinite(x)]
    if bad:
        parts.append(f"the loss is not finite in rows (data rank.row) {shorten(bad)}")
    if record.gradients:
        count = f"{len(record.gradients)} of {record.parameters}"
        parts.append(f"{count} gradients are not finite, from the output on: {shorten(record.gradients)}")
    elif not math.isfinite(record.grad_norm):
        parts.append("each gradient is finite, their norm is too large for float32")
    return "; ".join(parts)
