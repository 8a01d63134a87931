"""Guarded optimizer step: anomalies, judged by the preceding norms, are reported and dumped before any change."""

from __future__ import annotations

import logging
import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_fleet.algorithms.datum import Datum
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import PolicyConfig, SafetyConfig
from megatron_fleet.debug.dumps import Dumps, Record, Verdict, shorten
from megatron_fleet.platform.alerts import alert
from megatron_fleet.platform.waiting import together
from megatron_fleet.trainer.base import (
    AdamParams,
    LossReport,
    LossSpec,
    OptimReport,
    Ranks,
    Trainer,
    TrainerLost,
)

log = logging.getLogger(__name__)
WINDOW = 32
"""Number of most recent finite norms whose median is the reference for spikes."""
FEWEST = 8
"""Minimum number of norms to detect a spike: gradient norms of a run's first steps vary widely."""


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer step whose gradients are ready: number ``part`` (from 0) of training step ``step`` (from 1).

    Attributes:
        data: input of `Trainer.forward_backward`.
        report: its result.
    """

    step: int
    part: int
    lr: float
    data: Sequence[Datum]
    report: LossReport


class StepGuard:
    """Take optimizer steps, skipping those whose loss or gradient is not finite."""

    def __init__(self, policy: PolicyConfig, trainer: Trainer, dumps: Dumps) -> None:
        """Args: ``dumps``: keep the anomalous steps of ranks for replay."""
        self._optimizer, self._trainer, self._dumps = policy.optimizer, trainer, dumps
        self._judge = StepJudge(policy.safety)
        self._limit = policy.safety.max_skipped_in_a_row
        self._last = ""

    @property
    def stuck(self) -> bool:
        """Whether too many consecutive steps were skipped."""
        return self._judge.skipped_in_a_row >= self._limit

    def stop_if_stuck(self) -> None:
        """Raise UserError when too many consecutive steps were skipped. Save a checkpoint before."""
        if self.stuck:
            raise UserError(
                f"{self._judge.skipped_in_a_row} updates in a row were skipped because loss or gradient was not finite "
                f"(policy.safety.max_skipped_in_a_row={self._limit}; the last: {self._last}); the newest checkpoint "
                f"has the state before them: find the cause, or lower policy.optimizer.lr and resume from an older one."
            )

    def state(self) -> dict[str, Any]:
        """State for the checkpoint; JSON-able. A run that stopped restarts its count of skipped steps."""
        return self._judge.state() | ({"skipped_in_a_row": 0} if self.stuck else {})

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._judge.load(state)

    async def update(
        self, step: int, part: int, lr: float, data: Sequence[Datum], loss: LossSpec
    ) -> tuple[LossReport, OptimReport]:
        """Call `Trainer.forward_backward` and `Trainer.optim_step`, and report anomalies.

        Ranks hold an anomalous step, so that it is examined and dumped before any change. Another trainer, to which
        a round trip may take long, is given both calls at once, and its step is judged afterwards.
        """
        adam, ranks = AdamParams.of(self._optimizer, lr), self._trainer.ranks
        if ranks is not None:
            report = await self._trainer.forward_backward(data, loss)
            taken, verdict = await self._held_step(ranks, adam, Update(step, part, lr, data, report))
        else:
            trainer = self._trainer
            report, taken = await together(trainer.forward_backward(data, loss), trainer.optim_step(adam))
            verdict = self._judge.judge(report.loss, taken.grad_norm)
            if verdict is not Verdict.FINE:
                self._tell(step, fault(verdict, report.loss, taken.grad_norm, self._judge.median))
        self._judge.record(taken.grad_norm, taken.skipped)
        return report, replace(taken, spike=verdict is Verdict.SPIKE, skipped_total=self._judge.skipped)

    async def _held_step(self, ranks: Ranks, adam: AdamParams, update: Update) -> tuple[OptimReport, Verdict]:
        loss = update.report.loss
        # The bound is finite, so the ranks also hold a step whose norm is not.
        report = await ranks.optim_step(adam, hold_above=self._judge.bound(loss))
        if not report.held:
            return report, Verdict.FINE
        assert report.grad_norm is not None, "ranks know it"
        verdict = self._judge.judge(loss, report.grad_norm)
        await self._examine(ranks, update, report.grad_norm, verdict)
        if verdict is Verdict.SPIKE:
            return await ranks.optim_step(adam), verdict
        await self._trainer.discard_gradients()
        return replace(report, held=False, skipped=True), verdict

    async def _examine(self, ranks: Ranks, update: Update, norm: float, verdict: Verdict) -> None:
        found = await ranks.examine()
        record = Record(
            step=update.step,
            part=update.part,
            verdict=verdict.value,
            device=ranks.info.device,
            lr=update.lr,
            loss=update.report.loss,
            grad_norm=norm,
            median=self._judge.median,
            micro_batches=found.micro_batches,
            weights=found.weights,
            gradients=found.gradients,
            parameters=found.parameters,
        )
        where = await self._keep(update, record) if self._dumps.has_place(verdict) else ""
        self._tell(update.step, describe(record), where)

    def _tell(self, step: int, what: str, where: str = "") -> None:
        self._last = what
        alert(log, "update", f"step {step}: {what}{where}")

    async def _keep(self, update: Update, record: Record) -> str:
        """Write a dump; returns the outcome as text. A failed dump does not end the run, a lost trainer does."""
        try:
            path = await self._dumps.save(self._trainer.save_state, update.data, record)
        except TrainerLost:
            raise
        except Exception as error:
            return f" (it could not be kept for replay: {error})"
        return f"; look into it with `mfleet debug replay {path}`"


def describe(record: Record) -> str:
    """Describe the fault of a step in one line; sequences are named by their index in the data of the update."""
    parts = [fault(Verdict(record.verdict), record.loss, record.grad_norm, record.median)]
    if record.verdict == Verdict.SPIKE:
        return parts[0]
    if record.weights:
        parts.append(f"weights are not finite: {shorten(record.weights)}")
    if bad := [m for m in record.micro_batches if not math.isfinite(m.loss)]:
        among = [str(index) for micro_batch in bad for index in micro_batch.sequences]
        parts.append(
            f"the loss of {len(bad)} of {len(record.micro_batches)} micro-batches is not finite, with sequences "
            f"{shorten(among)}"
        )
    if record.gradients:
        count = f"{len(record.gradients)} of {record.parameters}"
        parts.append(f"{count} gradients are not finite, from the output on: {shorten(record.gradients)}")
    elif not math.isfinite(record.grad_norm):
        parts.append("each gradient is finite, their norm is too large for float32")
    return "; ".join(parts)


def fault(verdict: Verdict, loss: float, norm: float | None, median: float) -> str:
    """Say in a few words what is wrong with a step. ``median``: of the last gradient norms."""
    if norm is None:
        return f"loss {loss:.3g}, so the update was skipped"
    if verdict is Verdict.SPIKE:
        return f"gradient norm {norm:.3g} is {norm / median:.1f} × the median of the last ones"
    return f"loss {loss:.3g}, gradient norm {norm:.3g}, so the update was skipped"


class StepJudge:
    """Judge optimizer steps by loss and gradient norm, and count the skipped ones.

    Attributes:
        skipped: number of steps of the run that were not finite.
        skipped_in_a_row: number of skipped steps since the last finite one.
    """

    def __init__(self, safety: SafetyConfig) -> None:
        self._factor = safety.spike_factor
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped = self.skipped_in_a_row = 0

    @property
    def median(self) -> float:
        """Median of the last finite norms; 0 without any."""
        return statistics.median(self._norms) if self._norms else 0.0

    def bound(self, loss: float) -> float:
        """Largest acceptable norm of the next step. It is finite, and negative when ``loss`` is not finite.

        A median of 0 (nothing to learn) is not a reference.
        """
        if not math.isfinite(loss):
            return -1.0
        if self._factor is None or len(self._norms) < FEWEST or self.median == 0:
            return sys.float_info.max
        return min(self._factor * self.median, sys.float_info.max)

    def judge(self, loss: float, norm: float | None) -> Verdict:
        """Judge the next step by the recorded norms. ``norm``: ``None`` = not known."""
        if norm is None:
            return Verdict.FINE if math.isfinite(loss) else Verdict.NOT_FINITE
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Verdict.NOT_FINITE
        return Verdict.SPIKE if norm > self.bound(loss) else Verdict.FINE

    def record(self, norm: float | None, skipped: bool) -> None:
        """Record a finished step. Spikes are included, so the median follows when norms stay high."""
        if skipped:
            self.skipped += 1
            self.skipped_in_a_row += 1
            return
        self.skipped_in_a_row = 0
        if norm is not None:
            self._norms.append(norm)

    def state(self) -> dict[str, Any]:
        """JSON-able state for `load`."""
        return {
            "norms": list(self._norms),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._norms = deque(state["norms"], maxlen=WINDOW)
        self.skipped, self.skipped_in_a_row = state["skipped"], state["skipped_in_a_row"]
